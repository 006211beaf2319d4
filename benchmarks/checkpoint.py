"""The cost of checkpoints, and the loss after a resize: ``python -m benchmarks.checkpoint``, or ``make bench-checkpoint``.

*cost*: two workers on this machine, one thread each, with 100 million parameters and AdamW. An emulated accelerator computes
(it sleeps, as in the network lab), the optimizer, the exchange over loopback, the copies and the files are real. Timed on both
workers at once: a copy of all that is saved in memory, the call ``save(wait=False)``, steps with and without files being
written, the time until a checkpoint is complete, and ``load``. Needs 12 GiB of memory and 7 GB below ``--folder``, which are
given back. Written as checkpoint.json and checkpoint.md under benchmarks/results.

*resize*: digits, 8 workers, then 5, then 8 again, by ``load(..., resize=...)``, beside 8 that are not disturbed, and beside
what is left when one replica is kept. Threads of one process. Written as resize.json and resize.png under docs/results.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from benchmarks.report import machine
from benchmarks.worker import Accelerator
from decent_dp.checkpoint import latest, load, save
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.replica.snapshot import take
from decent_dp.transport import InProcessTransport, run_replicas
from decent_dp.utils import initialize_dist

__all__ = ["COLUMNS", "PLANS", "make_markdown", "resize"]

ROOT = Path(__file__).resolve().parents[1]
WIRES = ("float32", "int8")
MB = 1e6

# -- cost -------------------------------------------------------------------------------------------------------------

LAYERS, WIDTH = 24, 2048  # 100.7 million parameters
WARM_UP = 3
QUIET_STEPS = 6  # timed, after each checkpoint


class Model(nn.Module):
    """Linear layers, three for each block of the emulated accelerator."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x + layer(x)
            if i % 3 == 2:
                x = Accelerator.apply(x)  # type: ignore[no-untyped-call]
        return x


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def together(work: Callable[[], object]) -> float:
    """The time of a call that all workers begin at once, because they share the machine's memory."""
    dist.barrier()
    return seconds_of(work)


def parts_of(file: Path) -> dict[str, int]:
    """Bytes in a worker's file: of parameters, optimizer and the rest."""
    parts = dict.fromkeys(("parameters", "optimizer", "rest"), 0)
    with safe_open(file, "pt") as opened:
        for key in opened.keys():  # noqa: SIM118  (it is no dict)
            nbytes = opened.get_tensor(key).nbytes
            where = {"parameters": "parameters", "optim": "optimizer"}
            part = key.split(".")[1] if key.startswith("snapshot.") else ""
            parts[where.get(part, "rest")] += nbytes
    parts["rest"] = file.stat().st_size - parts["parameters"] - parts["optimizer"]
    return parts


def worker(options: argparse.Namespace) -> None:
    """One worker of the measurement; worker 0 prints the result."""
    torch.set_num_threads(1)
    rank, _ = initialize_dist()
    torch.manual_seed(rank)
    model = DecentralizedDataParallel(
        Model(options.layers, options.width),
        lambda params: torch.optim.AdamW(params, lr=1e-5, fused=True),
        topology="ring",
        compression=None if options.worker == "float32" else options.worker,
    )
    x = torch.randn(1, options.width)

    def step() -> None:
        model(x).square().mean().backward()

    for _ in range(WARM_UP):
        step()
    found: dict[str, Any] = {"copy_new": [], "copy": [], "save": [], "step": [], "step_while_saving": [], "delay": []}
    found |= {"complete": [], "load": []}
    time_copies(model, found, options.repeat)
    for _ in range(options.repeat):
        own = [together(step), *(seconds_of(step) for _ in range(QUIET_STEPS - 1))]
        found["step"].append(median(own[1:]))
        time_save(model, options.folder, step, found)
    newest = latest(options.folder)
    assert newest is not None
    found["bytes"] = parts_of(newest / f"worker-{rank:04d}.safetensors")
    for _ in range(options.repeat):
        found["load"].append(together(lambda: load(model, options.folder)))
        step()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    model.close()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(gathered))


def time_copies(model: DecentralizedDataParallel, found: dict[str, Any], repeat: int) -> None:
    """Copies of all tensors of a checkpoint, into new memory and into allocated memory."""
    tensors = list(tensors_in(take(model.replica)))

    def clone() -> list[Tensor]:
        return [tensor.detach().clone() for tensor in tensors]

    def copy() -> None:
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor.detach())

    for _ in range(repeat):
        found["copy_new"].append(together(clone))
    places = clone()
    for _ in range(repeat):
        found["copy"].append(together(copy))


def tensors_in(tree: object) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [tensor for value in tree.values() for tensor in tensors_in(value)]
    if isinstance(tree, (list, tuple)):
        return [tensor for value in tree for tensor in tensors_in(value)]
    return []


def time_save(model: DecentralizedDataParallel, folder: str, step: Callable[[], None], found: dict[str, Any]) -> None:
    """One checkpoint during training."""
    dist.barrier()
    began = time.perf_counter()
    saving = save(model, folder, keep=1, wait=False)
    found["save"].append(time.perf_counter() - began)
    over: list[float] = []

    def watch() -> None:
        saving.wait()
        over.append(time.perf_counter() - began)

    watcher = threading.Thread(target=watch)
    watcher.start()
    steps: list[float] = []
    # All workers make the same number of steps, until it is complete on all of them.
    while not steps or not all_are(saving.done):
        steps.append(seconds_of(step))
    watcher.join()
    if saving.error is not None:
        raise saving.error
    found["complete"].append(over[0])
    found["step_while_saving"].append(median(steps))
    found["delay"].append(found["save"][-1] + sum(steps) - len(steps) * found["step"][-1])


def all_are(yes: bool) -> bool:
    flag = torch.tensor(float(yes))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def launch(wire: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The workers' results, by rank."""
    with tempfile.TemporaryDirectory(prefix="decent-dp-checkpoint-", dir=options.folder) as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["-m", "benchmarks.checkpoint", "--worker", wire, "--folder", folder, "--repeat", str(options.repeat)]
        command += ["--layers", str(options.layers), "--width", str(options.width)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over repetitions, the mean over workers; ratios are of these."""

    def middle(name: str, own: slice = slice(None)) -> float:
        return fmean(median(result[name][own]) for result in found)

    line: dict[str, Any] = {f"{part}_bytes": found[0]["bytes"][part] for part in found[0]["bytes"]}
    line["bytes"] = sum(found[0]["bytes"].values())
    line["copy_new_s"], line["copy_s"] = middle("copy_new"), middle("copy")
    line["first_save_s"], line["save_s"] = middle("save", slice(1)), middle("save", slice(1, None))
    line["first_save_copies"] = line["first_save_s"] / line["copy_new_s"]
    line["save_copies"] = line["save_s"] / line["copy_new_s"]
    line["step_s"], line["step_while_saving_s"] = middle("step"), middle("step_while_saving")
    line["delay_s"] = middle("delay", slice(1, None))
    line["complete_s"], line["load_s"] = middle("complete"), middle("load")
    return line


COLUMNS: dict[str, tuple[str, str, float]] = {
    "parameters_bytes": ("MB in the file of each worker: parameters", ".0f", MB),
    "optimizer_bytes": ("… optimizer", ".0f", MB),
    "bytes": ("… all", ".0f", MB),
    "copy_new_s": ("a copy of all that into new memory, s", ".2f", 1),
    "copy_s": ("… into memory that is there already", ".2f", 1),
    "first_save_s": ("the call `save(wait=False)`, s: the first", ".2f", 1),
    "save_s": ("… later ones", ".2f", 1),
    "first_save_copies": ("… the first, in copies into new memory", ".2f", 1),
    "save_copies": ("… later ones, in copies into new memory", ".2f", 1),
    "step_s": ("step, s", ".2f", 1),
    "step_while_saving_s": ("… while files are being written", ".2f", 1),
    "delay_s": ("the whole delay by a checkpoint, s", ".2f", 1),
    "complete_s": ("until it is complete, s", ".1f", 1),
    "load_s": ("`load`, s", ".1f", 1),
}


def make_markdown(lines: Mapping[str, Mapping[str, float]]) -> str:
    """One column per compression."""
    rows = [["", *(f'compression="{wire}"' for wire in lines)], ["---", *["---:" for _ in lines]]]
    for key, (title, form, unit) in COLUMNS.items():
        rows.append([title, *(format(line[key] / unit, form) for line in lines.values())])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def cost(options: argparse.Namespace) -> None:
    lines = {}
    for wire in WIRES:
        lines[wire] = summary(launch(wire, options))
        print(make_markdown({wire: lines[wire]}), flush=True)
    out = options.out or ROOT / "benchmarks" / "results"
    out.mkdir(parents=True, exist_ok=True)
    settings = {"parameters": options.layers * options.width**2, "workers": 2, "threads": 1, "repeat": options.repeat}
    rounded = {wire: {k: round(v, 4) for k, v in line.items()} for wire, line in lines.items()}
    (out / "checkpoint.json").write_text(json.dumps({**settings, "machine": machine(), "wires": rounded}, indent=2) + "\n")
    (out / "checkpoint.md").write_text(make_markdown(rounded))


# -- resize -----------------------------------------------------------------------------------------------------------

PHASE = 120  # steps
BATCH = 32  # of each worker
SEEDS = (0, 1, 2)
# By name: workers in each phase, and how a phase begins: load's resize, or a new run from the kept replica of one worker.
PLANS: dict[str, tuple[tuple[int, ...], str | None]] = {
    "8 workers throughout": ((8,), None),
    "8, 5, 8: 'mean'": ((8, 5, 8), "mean"),
    "8, 5, 8: 'spread'": ((8, 5, 8), "spread"),
    "8, 5, 8: replica 0 alone": ((8, 5, 8), "one"),
}


def resize(phase: int = PHASE, seeds: Sequence[int] = SEEDS) -> list[dict[str, Any]]:
    """One row per plan and step: the means over workers and seeds of the loss, and of the consensus distance if measured."""
    data = importlib.import_module("examples.digits").load_data()[0].tensors
    rows = []
    for name, (sizes, how) in PLANS.items():
        runs: list[list[dict[str, Any]]] = []
        for seed in seeds:
            with tempfile.TemporaryDirectory(prefix="decent-dp-resize-") as folder:
                run: list[dict[str, Any]] = []
                for number, n in enumerate(sizes):
                    steps = range(len(run), (number + 1) * 3 * phase // len(sizes))
                    body = partial(train_phase, data=data, path=Path(folder), how=how, seed=seed, steps=steps)
                    run += [fmean_rows(own) for own in zip(*run_replicas(n, body, timeout=300), strict=True)]
                runs.append(run)
        rows += [{"panel": "digits", "run": name, **fmean_rows(own)} for own in zip(*runs, strict=True)]
        print(f"{name}: loss of the last ten steps {fmean(row['loss'] for row in rows[-10:]):.4f}", flush=True)
    return rows


def fmean_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The same step of several workers or seeds."""
    distances = [row["consensus_distance"] for row in rows]
    return {
        "step": rows[0]["step"],
        "loss": fmean(row["loss"] for row in rows),
        "consensus_distance": None if None in distances else fmean(distances),
    }


def train_phase(
    transport: InProcessTransport, *, data: Sequence[Tensor], path: Path, how: str | None, seed: int, steps: range
) -> list[dict[str, Any]]:
    """One worker, from the end of the previous phase to a checkpoint."""
    x, y = data
    with _MAKING:  # by the one generator that all threads have
        net = importlib.import_module("examples.digits").make_model(seed)
    model = DecentralizedDataParallel(
        net, partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.1), topology="base-2", transport=transport
    )
    if steps.start and how == "one":
        model.load_state_dict(torch.load(path / "model.pt", weights_only=True))
    elif steps.start:
        load(model, path, resize=how)
    rows = []
    for step in steps:
        draw = torch.Generator().manual_seed(10_000_000 * seed + 1000 * step + transport.rank)
        chosen = torch.randint(len(x), (BATCH,), generator=draw)
        loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        distance = model.consensus_distance() if step % 5 == 0 else None
        rows.append({"step": step + 1, "loss": float(loss.detach()), "consensus_distance": distance})
    if how == "one":
        if transport.rank == 0:
            torch.save(model.state_dict(), path / "model.pt")
    else:
        save(model, path)
    model.close()
    return rows


_MAKING = threading.Lock()


def write_resize(options: argparse.Namespace) -> None:
    from examples.curves import plot_training

    rows = resize()
    out = options.out or ROOT / "docs" / "results"
    out.mkdir(parents=True, exist_ok=True)
    settings = {"phase": PHASE, "batch": BATCH, "seeds": list(SEEDS), "topology": "base-2", "optimizer": "AdamW"}
    rounded = [{k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    (out / "resize.json").write_text(json.dumps({**settings, "machine": machine(), "rows": rounded}) + "\n")
    title = "Workers leave and come back: 8, then 5, then 8 again"
    plot_training(rows, out / "resize.png", title=title, window=5, marks=(PHASE, 2 * PHASE))  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description="What checkpoints cost.")
    parser.add_argument("what", nargs="*", metavar="cost|resize", help="which of the two; both when nothing is given")
    parser.add_argument("--repeat", type=int, default=5, help="checkpoints, copies and loads of each wire")
    parser.add_argument(
        "--folder", help="below it, in a folder that is removed, checkpoints are written; default: the system's"
    )
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--out", type=Path, help="where results are written, other than where they are kept")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    if wrong := set(options.what) - {"cost", "resize"}:
        parser.error(f"cost or resize, got {', '.join(sorted(wrong))}")
    if not options.what or "cost" in options.what:
        cost(options)
    if not options.what or "resize" in options.what:
        torch.set_num_threads(1)
        write_resize(options)


if __name__ == "__main__":
    main()
