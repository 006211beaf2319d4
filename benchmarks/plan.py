"""Checks the planner against what was measured: ``python -m benchmarks.plan``. Needs no torch.

The network lab: results/8x1-60.json, 8x1-200.json, 4x2-100.json and 3x2-100.json, every contender of this library and DDP,
from what is known of the set-ups and the step of a worker alone. Nothing is fitted, and the last was measured when the model
was finished.

A published table (arXiv 2410.11998): steps of a Transformer-base on three clusters. To the row of the fewest workers of each
cluster are fitted: the part of its step that more workers divide ('alternating-exp-ring'), and what the all-reduce and SGP add
to a worker's backward. To these three rows together: the part of a step that stays (a line through the steps of
'alternating-exp-ring' against what data sheets promise), and the links of a node (the fewest that let 'one-peer-exp' be so
near to 'alternating-exp-ring'). The other six rows are predicted.

Taken as given: 65 million parameters in float32 and 25,000 tokens per step; NCCL; forward a third of the computation; SGP
overlapped as 'one-peer-exp' is (an exchange that began after the step and blocked would be too slow for two of the three rows
that are fitted). The structure was chosen with knowledge of the whole table, the constants were not.

Prints the tables and writes them as results/plan.json, plan.md and plan.png.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.setups import Contender, Setup
from decent_dp.tools.planner import Choice, Cluster, Job, Link, predict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LAB_SETUPS", "OUTSIDE", "PAPER", "Cell", "Fit", "check_lab", "check_paper", "fit_paper", "wrong_orders"]

RESULTS = Path(__file__).resolve().parent / "results"
LAB_SETUPS = ("8x1-60", "8x1-200", "4x2-100", "3x2-100")
LAB_BOUND, PAPER_BOUND = 0.15, 0.20
# Cells of the table that are known to be further away: SGP on 16 and 32 A40. On 16 its 2.75 copies per step leave a node at 57
# Gbit/s, if every worker sends its whole message, and the two links of 25 Gbit/s that the fitted rows ask for carry less.
OUTSIDE = {("A40", 16, "SGP"), ("A40", 32, "SGP")}
# Of a frame of 1514 bytes TCP's payload is 1448: headers of Ethernet, IP and TCP with timestamps are the rest.
PAYLOAD = 1448 / 1514
# Of a packet of InfiniBand, 4096 bytes beside 26 of headers and check sums.
PAYLOAD_IB = 4096 / 4122


@dataclass(frozen=True)
class Cell:
    """A measured step and the prediction of it. ``fitted``: a constant was fitted to it."""

    setup: str
    contender: str
    workers: int
    measured_ms: float
    predicted_ms: float
    fitted: bool
    why: str

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


# -- the network lab --------------------------------------------------------------------------------------------------


def lab_cluster(setup: Setup) -> Cluster:
    """The set-up's links: their rate less headers; nothing is shaped inside a node. Latencies as a bridge has them."""
    if setup.rate is None:
        raise ValueError(f"the links of {setup.words()} are not known")
    inter = Link(100e-6, setup.rate * 1e6 / 8 * PAYLOAD)
    return Cluster(setup.world_size, setup.local, inter, Link(20e-6, float("inf")))


def check_lab(results: Path = RESULTS) -> list[Cell]:
    """Predicts every measured contender of DDP and of this library."""
    optimizer = json.loads((results / "optim.json").read_text())["forms"]["torch AdamW, fused"]["ms"]
    cells = []
    for name in LAB_SETUPS:
        data = json.loads((results / f"{name}.json").read_text())
        setup = Setup.parse(name)
        means = {line["contender"]: line["mean_ms"] for line in data["lines"]}
        job = Job.of_step(data["parameters"], means["alone"], optimizer_ms=optimizer)
        for line, measured in means.items():
            contender = Contender.parse(line)
            if contender.kind not in ("ddp", "ours"):
                continue
            kind = "ddp" if contender.kind == "ddp" else "decent_dp"
            choice = Choice(kind, contender.topology, None if contender.wire == "float32" else contender.wire)
            found = predict(lab_cluster(setup), job, choice)
            cells.append(Cell(name, line, setup.world_size, measured, found.step_ms, False, found.reason))
    return cells


# -- the published table ----------------------------------------------------------------------------------------------

PARAMS, TOKENS = 65e6, 25e3
FLOP = 6 * PARAMS * TOKENS  # of a step on all workers together: Kaplan et al., arXiv 2001.08361, section 2.1
ADAM_BYTES = 28  # per parameter and step: gradient, parameter and two moments are read, the last three written, in float32
CONTENDERS = ("all-reduce", "SGP", "one-peer-exp", "alternating-exp-ring")


@dataclass(frozen=True)
class Published:
    """A cluster of the table: its nodes, from data sheets of the parts, and ms per step by workers, as ``CONTENDERS``.

    Attributes:
        local: workers per node.
        gbit: of the network, as the table says.
        infiniband: NCCL has a device for each port and spreads a message over all; of bonded Ethernet a flow has one port.
        latency_us: of its kind of network; of little weight here.
        tflops: of matrix products in the precision that the published code allows: TF32 where there is one (A100, A40), else
            float32 (T4).
        memory: of an accelerator, GB/s.
        bus: of an accelerator to the others of its node, GB/s each way: PCIe 3.0 x16, NVLink 3, PCIe 4.0 x16.
    """

    local: int
    gbit: float
    infiniband: bool
    latency_us: float
    tflops: float
    memory: float
    bus: float
    rows: dict[int, tuple[float, float, float, float]]

    @property
    def fewest(self) -> int:
        return min(self.rows)

    def ideal_ms(self, n: int) -> float:
        """A worker's computation at the data sheet's rate."""
        return 1e3 * FLOP / n / (self.tflops * 1e12)


PAPER = {
    "T4": Published(
        8, 100, True, 5, 8.1, 320, 15.75,
        {16: (372.5, 425.5, 314.8, 312.3), 32: (225.5, 292.4, 178.8, 178.8), 64: (167.3, 235.5, 123.1, 122.2)},
    ),
    "A100": Published(
        4, 100, True, 5, 156, 1555, 300,
        {8: (73.0, 69.4, 63.4, 61.7), 16: (54.8, 53.0, 46.8, 45.8), 32: (51.5, 50.7, 44.7, 43.7)},
    ),
    "A40": Published(
        4, 25, False, 25, 74.8, 696, 31.5,
        {8: (166.1, 150.5, 122.8, 122.0), 16: (195.5, 99.9, 97.4, 78.9), 32: (188.5, 112.4, 110.8, 67.9)},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """The constants fitted to the rows of the fewest workers.

    Attributes:
        fixed_ms: of a step, whatever the number of workers (launches, small batches); one for all clusters.
        efficiency: the share of the data sheet's rate that goes with it.
        ports: links of a node; one for all clusters.
        shared_ms: by cluster: the part of the step at the fewest workers that more workers divide.
        extra_ms: by cluster and contender: the time that the exchange adds to the backward.
    """

    fixed_ms: float
    efficiency: float
    ports: int
    shared_ms: dict[str, float]
    extra_ms: dict[str, dict[str, float]]


def paper_prediction(name: str, n: int, contender: str, fit: Fit) -> tuple[float, str]:
    """A cell of the table, and why."""
    cluster = PAPER[name]
    optimizer = 1e3 * ADAM_BYTES * PARAMS / (cluster.memory * 1e9)
    job = Job.of_step(PARAMS, fit.fixed_ms + fit.shared_ms[name] * cluster.fewest / n, optimizer_ms=optimizer, jitter=0.0)
    payload = PAYLOAD_IB if cluster.infiniband else PAYLOAD
    inter, intra = Link(cluster.latency_us * 1e-6, cluster.gbit * 1e9 / 8 * payload), Link(5e-6, cluster.bus * 1e9)
    spread = fit.ports if cluster.infiniband else 1
    machines = Cluster(n, cluster.local, inter, intra, backend="nccl", ports=fit.ports, flow_ports=spread)
    extra = fit.extra_ms.get(name, {}).get(contender, 0.0)
    choice = {
        "all-reduce": Choice("ddp", extra_ms=extra),
        "SGP": Choice("push", extra_ms=extra),
    }.get(contender) or Choice("decent_dp", contender, extra_ms=extra)
    found = predict(machines, job, choice)
    return found.step_ms, found.reason


def _solve(predicted: Callable[[float], float], measured: float, most: float) -> float:
    """The argument in [0, ``most``] at which the growing prediction equals the measurement; 0 if it is above it already."""
    low, high = 0.0, most
    if predicted(low) >= measured:
        return low
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(middle) < measured else (low, middle)
    return (low + high) / 2


def fit_fixed() -> tuple[float, float]:
    """The fixed ms of a step and the efficiency: a line through the three steps of 'alternating-exp-ring' that are fitted.

    Least squares of relative errors in ``measured = ideal / efficiency + fixed``.
    """
    points = [(cluster.ideal_ms(cluster.fewest), cluster.rows[cluster.fewest][3]) for cluster in PAPER.values()]
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    x0, y0 = (sum(w * point[i] for w, point in zip(weights, points, strict=True)) / total for i in (0, 1))
    slope = sum(w * (x - x0) * (y - y0) for w, (x, y) in zip(weights, points, strict=True)) / sum(
        w * (x - x0) ** 2 for w, (x, _) in zip(weights, points, strict=True)
    )
    return y0 - slope * x0, 1 / slope


def fit_clusters(ports: int) -> Fit:
    """The constants of each cluster, with nodes of so many links."""
    fixed, efficiency = fit_fixed()
    shared: dict[str, float] = {}
    extra: dict[str, dict[str, float]] = {}
    for name, cluster in PAPER.items():
        row = dict(zip(CONTENDERS, cluster.rows[cluster.fewest], strict=True))

        def step(contender: str, shared_ms: float, extra_ms: float, name: str = name) -> float:
            guess = Fit(fixed, efficiency, ports, {name: shared_ms}, {name: {contender: extra_ms}})
            return paper_prediction(name, PAPER[name].fewest, contender, guess)[0]

        own = row["alternating-exp-ring"]
        shared[name] = _solve(lambda ms: step("alternating-exp-ring", ms, 0.0), own, own)
        extra[name] = {
            contender: _solve(lambda ms: step(contender, shared[name], ms), row[contender], row[contender])  # noqa: B023
            for contender in ("all-reduce", "SGP")
        }
    return Fit(fixed, efficiency, ports, shared, extra)


@cache
def fit_paper() -> Fit:
    """The fewest links of a node with which 'one-peer-exp' is within 3 % in all three rows, and all else with them."""
    for ports in (1, 2, 4, 8):
        fit = fit_clusters(ports)
        rows = {name: cluster.rows[cluster.fewest] for name, cluster in PAPER.items()}
        found = {name: paper_prediction(name, PAPER[name].fewest, "one-peer-exp", fit)[0] for name in rows}
        if all(abs(found[name] / row[2] - 1) <= 0.03 for name, row in rows.items()):
            return fit
    raise RuntimeError("no number of links explains the rows of 'one-peer-exp' with the fewest workers")


def check_paper(fit: Fit | None = None) -> list[Cell]:
    """All cells of the table."""
    fit = fit or fit_paper()
    cells = []
    for name, cluster in PAPER.items():
        for n, row in cluster.rows.items():
            for contender, measured in zip(CONTENDERS, row, strict=True):
                predicted, why = paper_prediction(name, n, contender, fit)
                cells.append(Cell(name, contender, n, measured, predicted, n == cluster.fewest, why))
    return cells


def wrong_orders(cells: Iterable[Cell], least: float = 0.03) -> list[str]:
    """Pairs of contenders in the same row whose measured steps differ by more than ``least``, predicted the other way round."""
    rows: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.setup, cell.workers), []).append(cell)
    wrong = []
    for (name, n), row in rows.items():
        for a, b in combinations(sorted(row, key=lambda cell: cell.measured_ms), 2):
            if b.measured_ms / a.measured_ms > 1 + least and b.predicted_ms <= a.predicted_ms:
                wrong.append(f"{name}, {n} workers: {a.contender} is faster than {b.contender}")
    return wrong


# -- output -----------------------------------------------------------------------------------------------------------


def make_lab_table(cells: Sequence[Cell]) -> str:
    lines = ["| set-up | contender | measured ms | predicted ms | error |", "| --- | --- | ---: | ---: | ---: |"]
    for cell in cells:
        numbers = f"{cell.measured_ms:.0f} | {cell.predicted_ms:.0f} | {100 * cell.error:+.1f} %"
        lines.append(f"| {cell.setup} | {cell.contender} | {numbers} |")
    return "\n".join(lines) + "\n"


def make_paper_table(cells: Sequence[Cell]) -> str:
    """One row per cluster and number of workers: measured, predicted and error of each contender."""
    lines = [f"| cluster | workers | {' | '.join(CONTENDERS)} |", "| --- | ---: |" + " ---: |" * len(CONTENDERS)]
    rows: dict[tuple[str, int], dict[str, Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.setup, cell.workers), {})[cell.contender] = cell
    for (name, n), row in rows.items():
        shown = [
            f"{cell.measured_ms:.1f} → {cell.predicted_ms:.1f} ({100 * cell.error:+.1f} %)"
            for cell in (row[contender] for contender in CONTENDERS)
        ]
        mark = " (fitted)" if row[CONTENDERS[0]].fitted else ""
        lines.append(f"| {name} | {n}{mark} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def as_json(lab: Sequence[Cell], paper: Sequence[Cell], fit: Fit) -> dict[str, Any]:
    def rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
        return [
            {
                "setup": cell.setup,
                "contender": cell.contender,
                "workers": cell.workers,
                "measured_ms": round(cell.measured_ms, 4),
                "predicted_ms": round(cell.predicted_ms, 2),
                "error": round(cell.error, 4),
                "fitted": cell.fitted,
                "why": cell.why,
            }
            for cell in cells
        ]

    constants = {
        "fixed_ms": round(fit.fixed_ms, 3),
        "efficiency": round(fit.efficiency, 4),
        "ports": fit.ports,
        "shared_ms": {name: round(value, 3) for name, value in fit.shared_ms.items()},
        "extra_ms": {name: {who: round(ms, 3) for who, ms in own.items()} for name, own in fit.extra_ms.items()},
    }
    return {"fit": constants, "wrong_orders": wrong_orders(paper), "lab": rows(lab), "paper": rows(paper)}


def draw(panels: Mapping[str, tuple[Sequence[Cell], float, str]], path: Path) -> Figure:
    """Relative errors of predictions against the measured step, fitted steps hollow, and the bound as background.

    Each panel: its cells, the bound, and the attribute of a cell that decides its colour.
    """
    from decent_dp.tools.plots import COLOURS, new_figure, written

    figure = new_figure(5.5 * len(panels), 4.2)
    for axis, (title, (cells, bound, by)) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        axis.axhspan(-100 * bound, 100 * bound, color="0.94", zorder=0)
        axis.axhline(0, color="0.6", linewidth=0.8, zorder=1)
        names = [getattr(cell, by) for cell in cells]
        for index, name in enumerate(dict.fromkeys(names)):
            colour = COLOURS[index % len(COLOURS)]
            for fitted in (False, True):
                own = [cell for cell, of in zip(cells, names, strict=True) if of == name and cell.fitted is fitted]
                face, label = ("white", None) if fitted else (colour, name)
                points = [cell.measured_ms for cell in own], [100 * cell.error for cell in own]
                axis.plot(*points, "o", color=colour, markerfacecolor=face, label=label)
        if any(cell.fitted for cell in cells):
            axis.plot([], [], "o", color="0.4", markerfacecolor="white", label="fitted")
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.xaxis.set_minor_formatter("{x:.0f}")
        axis.tick_params(axis="x", which="both", labelsize=8)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("measured step, ms")
        axis.set_ylabel("predicted against measured, %")
        axis.spines[["top", "right"]].set_visible(False)
        # Below the axes: its dots look like points.
        axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)
    return written(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 if an order is wrong, or a cell outside its bound of which that was not known."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=(main.__doc__ or "").strip())
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args(argv).out
    fit = fit_paper()
    lab, paper = check_lab(), check_paper(fit)
    tables = make_lab_table(lab) + "\n" + make_paper_table(paper)
    print(tables)
    print(f"fitted: {fit}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "plan.json").write_text(json.dumps(as_json(lab, paper, fit), indent=2, ensure_ascii=False) + "\n")
    (out / "plan.md").write_text(tables)
    draw({"network lab": (lab, LAB_BOUND, "setup"), "published clusters": (paper, PAPER_BOUND, "contender")}, out / "plan.png")
    far = [cell for cells, bound in ((lab, LAB_BOUND), (paper, PAPER_BOUND)) for cell in cells if abs(cell.error) > bound]
    unknown = [cell for cell in far if (cell.setup, cell.workers, cell.contender) not in OUTSIDE]
    for cell in far:
        known = "" if cell in unknown else ", as is known"
        print(f"outside{known}: {cell.setup}, {cell.workers} workers, {cell.contender}: {100 * cell.error:+.1f} %")
    for line in wrong_orders(paper):
        print(f"order: {line}")
    return 1 if unknown or wrong_orders(paper) else 0


if __name__ == "__main__":
    sys.exit(main())
