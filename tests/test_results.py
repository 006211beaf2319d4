"""Committed results: their tables are those of their commands, pages show them, and today's code still computes them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    endurance,
    fast,
    faults,
    holes,
    kills,
    learning,
    membership,
    report,
    shapes,
    slow_faults,
    time_to_loss,
    workbench,
)
from decent_dp.tools.planner import Choice, Job, more_steps
from decent_dp.topo import make_topology
from examples import compare, wires
from tests.helpers import ROOT
from tests.test_topo_finite import product

RESULTS = ROOT / "docs" / "results"


def text_of(path: str | Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def result_of(path: str | Path) -> Any:
    return json.loads(text_of(Path(path).with_suffix(".json")))


def lines_of(name: str) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = result_of(RESULTS / name)["lines"]
    return lines


LAB = ["8x1-60", "8x1-200", "4x2-100", "real-2", "real-8x1-200", "zeromq/8x1-60", "zeromq/8x1-200"]
# A table, the page that shows it, and how it is made of what lies beside it as JSON.
TABLES: list[tuple[str, str | None, Callable[[Any], str] | None]] = [
    *((f"benchmarks/results/{name}.md", "slow-links", lambda found: report.make_markdown(found["lines"])) for name in LAB),
    ("benchmarks/results/fast.md", None, fast.make_markdown),
    ("benchmarks/results/shapes.md", "slow-links", lambda found: shapes.make_table(found["rows"])),
    ("benchmarks/results/membership.md", "membership", membership.table),
    ("benchmarks/results/kills.md", "faults", kills.table),
    ("benchmarks/results/endurance.md", "faults", endurance.table),
    ("benchmarks/results/slow-faults.md", "faults", slow_faults.table),
    *((f"benchmarks/results/{name}.md", "faults", None) for name in ("unequal", "unequal-sim")),
    (
        "docs/results/digits.md",
        "demo",
        lambda found: compare.make_markdown(compare.HEADINGS, map(compare.cells, found["table"])),
    ),
    (
        "docs/results/wires.md",
        "slow-links",
        lambda found: wires.make_markdown(wires.headings(found["table"]), map(wires.cells, found["table"])),
    ),
    ("docs/results/learning.md", None, lambda found: learning.table(found["lines"])),
    ("docs/results/learning-summary.md", "learning", None),
    *((f"docs/results/{name}.md", "topologies", None) for name in ("topologies", "uneven-data")),
    ("benchmarks/results/3x2-100.md", "topologies", None),
    *((f"docs/results/{name}.md", "holes", None) for name in ("holes", "holes-learning")),
    *((f"docs/results/{name}.md", "scaling", None) for name in ("step-times", "nodes", "workers")),
    ("benchmarks/results/plan.md", "scaling", None),
]


@pytest.mark.parametrize(("table", "page", "make"), TABLES, ids=[table for table, *_ in TABLES])
def test_tables_are_those_of_the_results_and_of_the_pages(table, page, make):
    text = text_of(table)
    if make is not None:
        assert make(result_of(table)) == text
    if page is not None:
        assert text.strip() in text_of(f"docs/lab/{page}.md"), f"put {table} into docs/lab/{page}.md"


def test_the_pages_show_the_figures_of_each_fault():
    """Each row of the results stands there: in a row that begins and ends with the same cells, or as it is."""
    shown = {row[0]: row[-1] for page in ("docs/faults.md", "docs/lab/faults.md") for row in cells_of(text_of(page))}
    rows = dict(cells_of(text_of("benchmarks/results/faults.md"))[2:])
    assert rows == faults.rows(result_of("benchmarks/results/faults.md"))
    assert {what: shown.get(what) for what in rows} == rows


def cells_of(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def between(page: str, mark: str) -> str:
    """The part of a page between two marks."""
    found = re.search(rf"<!-- {mark}: begin.*?-->\n(.*?)<!-- {mark}: end -->", text_of(page), flags=re.DOTALL)
    assert found is not None
    return found[1].strip()


def test_marked_parts_of_pages_are_made_of_results():
    times, links = result_of(RESULTS / "time-to-loss"), result_of("benchmarks/results/fast")
    made = {("README.md", "time-to-loss"): time_to_loss.headline(times)}
    made |= {("docs/lab/time-to-loss.md", mark): text for mark, text in time_to_loss.tables(times).items()}
    made["docs/lab/fast.md", "passes"] = fast.make_passes(links["passes"])
    made["docs/lab/fast.md", "fast"] = fast.make_table(links["setups"][0]["lines"])
    for (page, mark), text in made.items():
        assert between(page, mark) == text.strip(), f"{page}: {mark}"
    assert learning.summary(lines_of("learning")) == text_of(RESULTS / "learning-summary.md")


def rows_of(name: str) -> dict[str, dict[str, Any]]:
    report_ = result_of(f"benchmarks/results/{name}")
    assert report_["device"] == "cuda"
    assert report_["counts"].keys() <= {"passed", "skipped"}
    return {row["case"]: row.get("figures", {}) for row in report_["rows"]}


def test_the_page_of_gpus_shows_the_committed_figures():
    page = " ".join(text_of("docs/lab/gpus.md").split())
    rows = rows_of("gpu") | {key: row for key, row in rows_of("gpu-int8").items() if "messages" in key}
    counts = result_of("benchmarks/results/gpu")["counts"]
    assert f"{counts['passed']} passed and {counts['skipped']} were skipped" in page
    for name, of_page in {"torch AdamW, fused": "torch.optim.AdamW(fused=True)`", "GossipAdamW": "fourth step"}.items():
        row = rows[f"speed: {name}"]
        assert f"{of_page} | {row['ms']:.2f} ms | {row['of_copy']:.2f} |" in page
    for name, of_page in {"int8": "in int8: coded, mixed", "low-rank:4": "of rank 4"}.items():
        both = [rows[f"speed: messages, {name}"][what] for what in ("encode", "mix")]
        times = ", ".join(f"{row['ms']:.2f} ms" for row in both)
        shares = ", ".join(f"{row['of_copy']:.2f}" for row in both)
        assert f"| a message {of_page} | {times} | {shares} |" in page
    assert f"{rows['speed: messages, None']['mix']['copy_gb_s']:,} GB/s" in page
    copies = rows["speed: host copies"]
    down, pieces, up = (copies[f"{way}_gb_s"] for way in ("to_cpu", "to_cpu_in_pieces", "to_gpu"))
    assert f"{down} GB/s to the CPU, {pieces} in pieces of 4 MiB, {up} to the GPU" in page
    row = rows["speed: an update of 100 M parameters, int8"]
    assert f"{row['exchange_ms']:.2f} ms, {row['exchange_ms'] / row['step_ms']:.1%}".replace("%", " %") in page


# -- computed again ----------------------------------------------------------------------------------------------------------


def again(name: str, out: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[dict[str, Any]]:
    """The lines of an experiment of the workbench, or of a part of it, made now."""
    for setting, value in settings.items():
        monkeypatch.setattr(workbench, setting, value)
    workbench.EXPERIMENTS[name](out, result_of(RESULTS / name).get("seeds", [0]))
    made: list[dict[str, Any]] = json.loads((out / f"{name}.json").read_text())["lines"]
    return made


@pytest.mark.slow
def test_figures_of_rounds(tmp_path, monkeypatch):
    lines = again("topologies", tmp_path, monkeypatch)
    for line, kept in zip(lines, lines_of("topologies"), strict=True):
        # A rate of many rounds depends on the machine in its last digits.
        assert line == {**kept, "rate": pytest.approx(kept["rate"], rel=1e-3)}
    assert (tmp_path / "topologies.md").read_text() == text_of(RESULTS / "topologies.md")
    for line in lines:
        sizes = {"local_world_size": line["local_world_size"], "world_size": line["workers"]}
        topology = make_topology(line["topology"], rank=0, **sizes)
        if topology.period is not None:
            assert line["exact"] == (abs(product(topology) - 1 / line["workers"]).max() < 1e-12)


def test_figures_of_holes(tmp_path, monkeypatch):
    kept = {(line["topology"], line["workers"], line["dead"]): line for line in lines_of("holes")}
    monkeypatch.setattr(holes, "ROUNDS", [("base-2", 12), ("ring", 16)])
    monkeypatch.setattr(holes, "DEAD", (0, 1, 2))
    holes.holes(tmp_path, [])
    for line in json.loads((tmp_path / "holes.json").read_text())["lines"]:
        for key, value in kept[line["topology"], line["workers"], line["dead"]].items():
            assert line[key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-3)), line


@pytest.mark.slow
def test_steps_are_predicted_as_committed(tmp_path, monkeypatch):
    kept = {(line["cluster"], line["workers"], line["contender"]): line["step_ms"] for line in lines_of("step-times")}
    for line in again("step-times", tmp_path, monkeypatch, PLANNED=(8, 24)):
        key = (line["cluster"], line["workers"], line["contender"])
        assert line["step_ms"] == pytest.approx(kept[key], rel=0.01), key
    of_nodes = [line for line in lines_of("nodes") if line["model"] == "350 M"]
    for line, was in zip(
        again("nodes", tmp_path, monkeypatch, JOBS={"350 M": workbench.JOBS["350 M"]}), of_nodes, strict=False
    ):
        assert line["contender"] == was["contender"]
        assert list(line["step_ms"].values()) == pytest.approx(list(was["step_ms"].values()), rel=0.01)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learning_is_simulated_as_committed(tmp_path, monkeypatch):
    """One column of the table; other machines round otherwise, which moves some images of 360."""
    monkeypatch.setattr(workbench, "names_that_fit", lambda *_: ["ring"])
    settings = {"COMPOSED": (), "ALPHAS": (None, 0.1), "RATES": {"momentum": workbench.RATES["momentum"]}}
    kept = {(line["contender"], line["optimizer"], line["alpha"]): line for line in lines_of("uneven-data")}
    for line in again("uneven-data", tmp_path, monkeypatch, **settings):
        was = kept[line["contender"], line["optimizer"], line["alpha"]]
        assert line["accuracy"] == pytest.approx(was["accuracy"], abs=0.01)
        assert line["bytes_per_worker_and_step"] == pytest.approx(was["bytes_per_worker_and_step"])


def test_the_results_of_learning_are_complete():
    lines = lines_of("learning")
    fresh = copy.deepcopy(lines)
    for line in fresh:
        line["loss_ratio"] = line["gap"] = None
    assert learning.compared(fresh) == lines
    for line in lines:
        assert line["loss"] == pytest.approx(sum(line["losses"]) / len(line["losses"]))
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    settings = {(at.task, at.n, at.alpha, at.real, kind) for at, kinds in learning.settings(tasks) for kind in kinds}
    at_higher_rates = {(task, learning.SIMULATED, 0.0, False, learning.INT8) for task in tasks}
    found = {tuple(line[key] for key in ("task", "n", "alpha", "real", "contender")) for line in lines}
    assert settings <= found <= settings | at_higher_rates


@pytest.mark.slow
def test_the_committed_choices_are_those_of_the_planner():
    setups = result_of(RESULTS / "time-to-loss")["setups"]
    for setup, found in zip((time_to_loss.MAIN, *time_to_loss.OTHERS), setups, strict=True):
        for rate in time_to_loss.RATES if setup is time_to_loss.MAIN else time_to_loss.OTHERS[setup]:
            committed, now = found["rates"][str(rate)], time_to_loss.chosen(setup, rate)
            assert committed["planned"] == time_to_loss.planned(setup, rate)
            assert committed["predicted"] == {"steps": pytest.approx(now.steps), "to_ddp": pytest.approx(now.to_ddp)}


def test_the_planner_estimates_the_steps_that_were_measured():
    main = time_to_loss.MAIN
    job = Job.of_step(main.params, 32, width=main.width)
    for name, row in result_of(RESULTS / "time-to-loss")["contenders"].items():
        if name.startswith("ours/"):
            _, topology, compression, h = name.split("/")
            choice = Choice("decent_dp", topology, None if compression == "none" else compression, mix_every=int(h))
            estimate = 500 * more_steps(choice, job)
            # Of those that did not reach the loss the steps are fewer than needed.
            assert estimate > 0.88 * row["steps"], name
            assert estimate < 1.12 * row["steps"] or not row["reaches"], name
