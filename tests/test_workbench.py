"""The committed tables of the workbench equal its commands' results and those on the pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import holes, workbench
from decent_dp.topo import make_topology
from tests.test_topo_finite import product

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"


def committed(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def again(name: str, out: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[dict[str, Any]]:
    """The lines of an experiment, or of a part of it, made now."""
    for setting, value in settings.items():
        monkeypatch.setattr(workbench, setting, value)
    workbench.EXPERIMENTS[name](out, committed(name).get("seeds", [0]))
    made: list[dict[str, Any]] = json.loads((out / f"{name}.json").read_text())["lines"]
    assert (out / f"{name}.png").exists() or name in ("uneven-data", "nodes")
    return made


@pytest.mark.parametrize(
    ("page", "tables"),
    [
        ("lab/topologies.md", ["docs/results/topologies.md", "docs/results/uneven-data.md", "benchmarks/results/3x2-100.md"]),
        ("lab/holes.md", ["docs/results/holes.md", "docs/results/holes-learning.md"]),
        (
            "lab/scaling.md",
            ["docs/results/step-times.md", "docs/results/nodes.md", "docs/results/workers.md", "benchmarks/results/plan.md"],
        ),
    ],
)
def test_the_pages_show_the_committed_tables(page: str, tables: list[str]) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for table in tables:
        assert (ROOT / table).read_text(encoding="utf-8").strip() in text, f"put {table} into docs/{page}"


@pytest.mark.slow
def test_figures_of_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = again("topologies", tmp_path, monkeypatch)
    for line, kept in zip(lines, committed("topologies")["lines"], strict=True):
        # A rate of many rounds depends on the machine in its last digits.
        assert line == {**kept, "rate": pytest.approx(kept["rate"], rel=1e-3)}
    assert (tmp_path / "topologies.md").read_text() == (RESULTS / "topologies.md").read_text()
    for line in lines:
        topology = make_topology(
            line["topology"], local_world_size=line["local_world_size"], world_size=line["workers"], rank=0
        )
        if topology.period is not None:
            n = line["workers"]
            assert line["exact"] == (abs(product(topology) - 1 / n).max() < 1e-12)


def test_figures_of_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And that the page's sentences hold in all lines."""
    kept = {(line["topology"], line["workers"], line["dead"]): line for line in committed("holes")["lines"]}
    monkeypatch.setattr(holes, "ROUNDS", [("base-2", 12), ("ring", 16)])
    monkeypatch.setattr(holes, "DEAD", (0, 1, 2))
    holes.holes(tmp_path, [])
    for line in json.loads((tmp_path / "holes.json").read_text())["lines"]:
        for key, value in kept[line["topology"], line["workers"], line["dead"]].items():
            assert line[key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-3)), line
    for (name, n, dead), line in kept.items():
        if name in ("base-2", "one-peer-exp"):
            assert (line["worst"] == 0) == (dead == 0)
            assert dead != 1 or n & (n - 1) or line["mean"] == line["worst"] == 0.5
            assert dead > 2 or line["cut"] == 0


@pytest.mark.slow
def test_survivors_learn_as_committed() -> None:
    """One run of the table's three; other machines round otherwise, which moves some images of 360."""
    lines = {(line["topology"], line["alpha"], line["dead"]): line for line in committed("holes-learning")["lines"]}
    for topology in holes.TOPOLOGIES:
        last = holes.train(topology, None, 4, 0)[-1]
        assert abs(last["accuracy"] - lines[topology, None, 4]["accuracy"]) < 0.02
    for alpha in holes.ALPHAS:
        none, four = (lines["base-2", alpha, dead] for dead in (0, 4))
        assert none["accuracy"] - four["accuracy"] < 0.015
        assert lines["ring", alpha, 4]["consensus_distance"] > 100 * four["consensus_distance"]


@pytest.mark.slow
def test_steps_are_predicted_as_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = again("step-times", tmp_path, monkeypatch, PLANNED=(8, 24))
    kept = {(line["cluster"], line["workers"], line["contender"]): line["step_ms"] for line in committed("step-times")["lines"]}
    assert lines
    for line in lines:
        key = (line["cluster"], line["workers"], line["contender"])
        assert line["step_ms"] == pytest.approx(kept[key], rel=0.01), key


@pytest.mark.slow
def test_nodes_are_predicted_as_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = again("nodes", tmp_path, monkeypatch, JOBS={"350 M": workbench.JOBS["350 M"]})
    kept = [line for line in committed("nodes")["lines"] if line["model"] == "350 M"]
    for line, was in zip(lines, kept, strict=True):
        assert line["contender"] == was["contender"]
        assert list(line["step_ms"].values()) == pytest.approx(list(was["step_ms"].values()), rel=0.01)


def test_the_page_says_where_pytorch_is_as_good() -> None:
    whole, sharded = (line for line in committed("nodes")["lines"] if line["contender"] == "gossip()")
    assert (round(whole["as_good_from"], -1), round(sharded["as_good_from"], -1)) == (70, 190)
    page = (ROOT / "docs" / "lab" / "scaling.md").read_text(encoding="utf-8")
    assert "From about 70 Gbit/s on DDP is as good with 350 million parameters, and from about 190 Gbit/s" in page


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learning_is_simulated_as_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One column of the table; other machines round otherwise, which moves some images of 360."""
    monkeypatch.setattr(workbench, "names_that_fit", lambda *_: ["ring"])
    settings = {"COMPOSED": (), "ALPHAS": (None, 0.1), "RATES": {"momentum": workbench.RATES["momentum"]}}
    lines = again("uneven-data", tmp_path, monkeypatch, **settings)
    kept = {(line["contender"], line["optimizer"], line["alpha"]): line for line in committed("uneven-data")["lines"]}
    assert len(lines) == 5
    for line in lines:
        was = kept[line["contender"], line["optimizer"], line["alpha"]]
        assert line["accuracy"] == pytest.approx(was["accuracy"], abs=0.01)
        assert line["bytes_per_worker_and_step"] == pytest.approx(was["bytes_per_worker_and_step"])


def test_the_pages_agree_with_the_learning() -> None:
    lines = {(line["contender"], line["optimizer"], line["alpha"]): line for line in committed("uneven-data")["lines"]}
    base = {optimizer: lines["all samples in one batch", optimizer, None]["accuracy"] for optimizer in workbench.RATES}
    for (contender, optimizer, alpha), line in lines.items():
        if contender == "all samples in one batch":
            continue
        lost = base[optimizer] - line["accuracy"]
        if alpha is None:
            assert lost < 0.005, "with even data nothing is lost"
        elif optimizer == "momentum":
            assert lost < 0.015, "with momentum little"
        elif optimizer == "adamw" and alpha == 0.1:
            assert lost > 0.05, "with AdamW much"
        elif optimizer == "gossip-adamw":
            assert line["accuracy"] > lines[contender, "adamw", alpha]["accuracy"], "with GossipAdamW less"
    for line in committed("workers")["lines"]:
        if line["topology"] == "ring" and line["workers"] == 192:
            assert line["worst_accuracy"] < line["accuracy"] - 0.1


def test_all_samples_in_one_batch_equals_ddp() -> None:
    """The mean gradient over n batches of one size is the gradient over all of them."""
    alone = workbench.one_worker(workbench.UNEVEN)
    assert (alone.n, alone.batch, alone.alpha) == (1, workbench.UNEVEN.n * workbench.UNEVEN.batch, None)
    assert (alone.steps, alone.seed) == (500, workbench.UNEVEN.seed)
