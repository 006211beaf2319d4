"""The command line: what it prints, against independent computations, and what it refuses."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from decent_dp.tools.analysis import analyse, consensus_error
from decent_dp.tools.cli import app, doctor, main, plan, simulate, topology
from decent_dp.tools.cli.inputs import as_count, as_rate, as_seconds
from decent_dp.tools.cli.screen import number, plain_json, size
from decent_dp.topo import make_topology

RANK_VARIABLES = ("RANK", "SLURM_PROCID")


class Cli:
    """Runs commands in this process; what came on the two streams."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, line: str, *more: str, code: int = 0) -> str:
        out, err, got = self.all(line, *more)
        assert got == code, err
        assert code or not err
        return out

    def all(self, line: str, *more: str) -> tuple[str, str, int]:
        self._capsys.readouterr()
        code = main([*shlex.split(line), *more])
        captured = self._capsys.readouterr()
        return captured.out, captured.err, code

    def json(self, line: str, *more: str) -> Any:
        def refuse(text: str) -> None:
            raise AssertionError(f"{text} is no JSON")

        return json.loads(self(line, *more, "--json"), parse_constant=refuse)


def prepared(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    for name in (*RANK_VARIABLES, "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    return Cli(capsys)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    return prepared(capsys, monkeypatch)


def links(n: int, local: int, mbit: float = 1000.0, us: float = 50.0) -> dict[str, Any]:
    """The doctor's document about n workers."""
    off = [[None if i == j else 1.0 for j in range(n)] for i in range(n)]
    return {
        "format": "decent_dp-doctor-1",
        "world_size": n,
        "nodes": [rank // local for rank in range(n)],
        "backend": "gloo",
        "latency_us": [[x and x * us for x in row] for row in off],
        "mbit_s": [
            [x and x * mbit * (10 if i // local == j // local else 1) for j, x in enumerate(row)] for i, row in enumerate(off)
        ],
    }


# -- topology show ---------------------------------------------------------------------------------------------------------


def test_show_is_the_analysis_with_its_rounds(cli: Cli) -> None:
    made = make_topology("complete:2,ring", local_world_size=2, world_size=4, rank=0)
    found = cli.json("topology show complete:2,ring -n 4 -l 2 --epsilon 1e-2")
    expected = asdict(analyse(made, epsilon=1e-2))
    assert {key: found[key] for key in expected} == {**expected, "name": "complete:2,ring"}
    assert found["rounds"][:3] == [[asdict_of(edge) for edge in made.round(t)] for t in range(3)]
    assert found["consensus_error"] == pytest.approx(consensus_error(made, len(found["consensus_error"]) - 1))
    row = next(row for row in cli.json("topology compare -n 4 -l 2")["topologies"] if row["name"] == "ring")
    shown = cli.json("topology show ring -n 4 -l 2")
    assert {key: shown[key] for key in row} == row


def asdict_of(edge: Any) -> dict[str, Any]:
    return {"ranks": edge.ranks, "weight": edge.weight}


def test_the_same_figures_in_words(cli: Cli) -> None:
    found = cli.json("topology show base-2 -n 24 -l 4")
    text = cli("topology show base-2 -n 24 -l 4")
    assert "24 workers on 6 nodes of 4" in text
    assert re.search(r"averages exactly +yes: after 6 rounds", text)
    assert re.search(r"agreement to 0.001 +after 6 rounds", text)
    copies = found["sent_by_worker"]
    assert re.search(rf"a worker sends +{number(copies)} copies of the model per step", text)
    assert re.search(rf"into one node +at most {number(found['fan_in'])} copies", text)
    rounds = found["rounds"]
    alone = sum(len(edge["ranks"]) == 1 for edges in rounds for edge in edges) / 24 / len(rounds)
    assert 0 < alone < 1
    assert re.search(rf"idle +{100 * alone:.3g} % of the rounds", text)
    assert "  round 5: (8 16) 0.5  (9 17) 0.5" in text
    ring = cli("topology show ring -n 6")
    assert re.search(r"averages exactly +no", ring)
    assert "  round 1: (1 2) 0.5  (3 4) 0.5  (0 5) 0.5\n" in ring


def test_show_without_the_dead(cli: Cli) -> None:
    found = cli.json("topology show base-2 -n 16 --dead 5,3")
    assert found["survivors"] == {"dead": [3, 5], "rate": pytest.approx(0.5**0.5), "exact": False, "rounds_to_epsilon": 19}
    assert {**found, "survivors": None} == {**cli.json("topology show base-2 -n 16"), "survivors": None}
    text = " ".join(cli("topology show base-2 -n 16 --dead 3,5").split())
    assert "without 3, 5 the 14 others: consensus error times 0.707 per round, in the long run; 0.001 after 19 rounds" in text
    assert "without 3, 8 cut: the 14 others are in parts that never mix" in " ".join(
        cli("topology show ring -n 16 --dead 3,8").split()
    )
    assert "one worker trains alone" in cli("topology show ring -n 2 --dead 0")


def test_many_rounds_and_large_groups_are_shortened(cli: Cli) -> None:
    text = cli("topology show base-2 -n 200")
    assert " … (--json has all)\n" in text
    assert max(map(len, text.splitlines())) < 200
    assert "14 15 … (64 in all)) 0.01562\n" in cli("topology show complete -n 64")
    assert "do not repeat" in cli("topology show random-matching -n 8")


# -- compare ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["40", "80"])
def test_compare_never_cuts_a_number(cli: Cli, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    found, text = cli.json("topology compare -n 24 -l 4"), cli("topology compare -n 24 -l 4")
    rows = {row["name"]: row for row in found["topologies"]}
    assert set(rows) == {"complete", "ring", "base-2", "random-matching", "hierarchical"}
    for row in rows.values():
        tail = [
            "-" if row["period"] is None else str(row["period"]),
            "yes" if row["exact"] else "no",
            number(row["spectral_gap"], 2),
            str(row["rounds_to_epsilon"]),
            str(row["degree"]),
            *(number(row[key]) for key in ("sent_by_worker", "sent_by_node", "fan_in")),
        ]
        assert re.search(r" +".join(map(re.escape, tail)), text), row["name"]
    assert [row["name"] for row in found["do_not_fit"]] == ["one-peer-exp", "alternating-exp-ring"]
    order = [name for line in text.splitlines() for name in rows if line.startswith(f"{name} ")]
    if columns not in ("40", "60"):
        assert order == ["complete", "hierarchical", "base-2", "random-matching", "ring"]


def test_a_plot_is_written(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    assert f"plot: {path}" in cli("topology show base-2 -n 6", "--plot", str(path))
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# -- plan ------------------------------------------------------------------------------------------------------------------

JOB = "plan --params 65e6 --step-ms 60"
CLUSTER = "-n 8 -l 4 --inter 25gbit --intra 200gbit"


def test_plan_ranks_and_says_why(cli: Cli) -> None:
    found, text = cli.json(f"{JOB} {CLUSTER} --top 3"), cli(f"{JOB} {CLUSTER} --top 3")
    rows = found["predictions"]
    assert [row["rank"] for row in rows[:3]] == [1, 2, 3]
    assert rows[-1]["kind"] == "ddp"  # always there to compare with
    assert rows[0]["step_ms"] < rows[-1]["step_ms"]
    assert len(rows) == 4
    for row in rows:
        ratio = "" if row["kind"] == "ddp" else rf" +{re.escape(number(rows[-1]['step_ms'] / row['step_ms']))} x"
        cells = [row["compression"] or "-", number(row["bucket_mb"]), re.escape(number(row["step_ms"], 4)) + ratio]
        assert re.search(" +".join(cells) + " ", text)
    assert f"1. {rows[0]['name']}: {rows[0]['reason']}" in text
    assert f"PyTorch DDP: {rows[-1]['reason']}" in text
    # Of two nodes every topology is their pair.
    names = [name["name"] for name in found["same_rounds"] if name["as"] == "complete"]
    assert {"one-peer-exp", "base-2"} <= set(names)
    assert re.search(r"the same rounds here:\n(?: +\S+ +is complete\n)* +one-peer-exp +is complete\n", text)
    assert {row["replica"] for row in rows} == {"worker", "node"}
    assert 'write gossip(model, optimizer, topology=..., replica="node")' in text
    assert "needs a power of two nodes" in cli(f"{JOB} -n 12 -l 4 --inter 25gbit --intra 200gbit --top 1")


def test_plan_from_a_measured_file(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text(json.dumps(links(4, 2, mbit=940.0, us=70.0)))
    found = cli.json(f"{JOB} --top 1 --measured", str(path))["cluster"]
    assert (found["world_size"], found["local_world_size"], found["backend"]) == (4, 2, "gloo")
    assert found["inter"] == pytest.approx({"latency_us": 70, "mbit_s": 940})
    assert found["intra"] == pytest.approx({"latency_us": 70, "mbit_s": 9400})
    assert cli.json(f"{JOB} --top 1 --backend nccl --measured", str(path))["cluster"]["backend"] == "nccl"


# -- units -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("25gbit", 25e9), ("25Gb/s", 25e9), ("1.5 gbps", 1.5e9), ("3GB/s", 24e9), ("1GiB/s", 8 * 2**30), ("56kbit", 56e3),
        ("1e9bit", 1e9), ("10,000mbit", 1e10), (".5gbit", 5e8),
    ],
)  # fmt: skip
def test_rates(text: str, bits: float) -> None:
    assert as_rate("--inter", text) == pytest.approx(bits / 8)


def test_times_and_counts() -> None:
    times = {"20us": 2e-5, "20µs": 2e-5, "0.1ms": 1e-4, "300ns": 3e-7, "1s": 1.0, "2 ms": 2e-3}
    assert {text: as_seconds("t", text) for text in times} == pytest.approx(times)
    counts = {"65e6": 65_000_000, "65M": 65_000_000, "1.3B": 1_300_000_000, "65,000,000": 65_000_000, "12": 12, "1_000": 1000}
    assert {text: as_count("c", text) for text in counts} == counts


def test_numbers_for_readers() -> None:
    assert [number(x) for x in (0.0, 0.012345, 1.5, 99.95, 123.4, 4993.2, 1e6, 9.9e6, 1.234e7, -3.3e30)] == [
        "0", "0.0123", "1.5", "100", "123", "4,993", "1,000,000", "9,900,000", "1.23e+07", "-3.3e+30",
    ]  # fmt: skip
    assert [number(x) for x in (None, math.nan, math.inf)] == ["-"] * 3
    assert [size(x) for x in (12.0, 1500.0, 2.6e8, 9.996e8, 1.04e9, 5e12, 1e18)] == [
        "12 B", "1.5 kB", "260 MB", "1,000 MB", "1.04 GB", "5,000 GB", "1e+09 GB",
    ]  # fmt: skip
    assert json.loads(plain_json({"a": [math.inf, math.nan, 1.5], 2: (None,)})) == {"a": [None, None, 1.5], "2": [None]}


# -- bad input -------------------------------------------------------------------------------------------------------------

BAD = {
    "topology show": "Missing argument",
    "topology show ring -n 4 -l 8": "write at most 4",
    "topology show ring -n 1000000000": "write a smaller number",
    "topology show rnig -n 4": "did you mean 'ring'",
    "topology show one-peer-exp -n 6": "needs a power of two workers, got 6; 'base-2'",
    "topology show hierarchical -n 6 -l 4": "do not fill nodes of -l 4; write -n 4 or 8",
    "topology show complete:x,ring -n 4": "complete:x",
    "topology show ring -n 4 --epsilon 0": "--epsilon must be above 0 and below 1",
    "topology show ring -n 4 --plot /nowhere/a.png": "give a file in a folder that exists",
    "topology show ring -n 4 --plot a.doc": ".png",
    "topology show ring -n 4 --dead two": "write numbers of workers, 0 to 3, such as 0,3",
    "topology show ring -n 4 --dead 2,4": "has a number that is none of the -n 4 workers",
    "topology show ring -n 2 --dead 0,1": "leaves none of the -n 2 workers",
    "topology show complete -n 4 --dead 1": "--dead needs a topology of pairs",
    "topology compaer -n 4": "Did you mean 'compare'?",
    "simulate --topology ring -n 4 --data imagenet": "'digits'",
    "simulate --topology ring -n 4 --alpha 0": "alpha must be positive",
    "simulate --topology ring -n 4 --momentum-tracking": "optimizer='gossip-adamw' or 'momentum', and it is 'adamw'",
    "simulate --topology ring -n 4 --seed -1": "Invalid value for '--seed'",
    "simulate --topology ring -n 4 --compression int9": "did you mean 'int8'",
    "simulate --topology ring -n 8 --batch 200000": "write --batch 131072 or less",
    "simulate --topology ring -n 5000": "1437 samples are too few for 5000 workers",
    "plan": "Missing option '--params'",
    "plan --params 65e6 --step-ms 0 -n 4 --inter 1gbit": "step_ms must be the milliseconds",
    "plan --params -5 --step-ms 60 -n 4 --inter 1gbit": "--params must be above zero",
    "plan --params 1.5 --step-ms 60 -n 4 --inter 1gbit": "no whole number",
    f"{JOB} --inter 1gbit": "the workers are missing",
    f"{JOB} -n 4096 --inter 1gbit": "more than the 1024 workers that this command takes; write a smaller number",
    f"{JOB} -n 4": "--inter is missing",
    f"{JOB} -n 4 -l 2 --inter 1gbit": "--intra is missing",
    f"{JOB} -n 4 --inter fast": "write a rate such as 25gbit",
    f"{JOB} -n 4 --inter 25": "'25' is not understood: write a rate such as 25gbit",
    f"{JOB} -n 4 --inter 1gbit --latency-inter 20": "not understood: write a time such as 20us",
    f"{JOB} -n 4 --inter 1gbit --backend ncl": "did you mean 'nccl'?",
    f"{JOB} --measured nowhere.json": "cannot be read",
    f"{JOB} --measured {__file__}": "is no JSON",
    f"{JOB} --measured x.json -n 4": "leave -n out",
    "doctor --seconds-a-pair 0": "--seconds-a-pair must be above 0",
    "doctor --timeout 1e300": "at most 3600 seconds, got 1e+300",
    "doctor --out /nowhere/x.json": "give a file in a folder that exists",
    "--versoin": "No such option",
}  # fmt: skip


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line_and_code_2(cli: Cli, line: str) -> None:
    out, err, code = cli.all(line)
    assert (code, out) == (2, ""), err
    assert re.fullmatch(r"decent-dp: [^\n]+\n", err), err
    assert BAD[line] in err


def test_a_store_that_cannot_listen(cli: Cli) -> None:
    for given, said in (("29500", "--bind must be HOST:PORT"), ("192.0.2.1:29500", "cannot listen on 192.0.2.1:29500")):
        out, err, code = cli.all(f"roster --bind {given}")
        assert (out, code) == ("", 2 if given == "29500" else 1)
        assert said in err


# -- help, and errors of other kinds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "",
        "topology",
        "topology show",
        "topology compare",
        "simulate",
        "plan",
        "doctor",
        "roster",
        "status",
        "kill",
        "watch",
    ],
)
def test_help_with_examples(cli: Cli, line: str) -> None:
    text = cli(f"{line} --help")
    assert "Usage: decent-dp" in text
    if line != "topology":
        assert "Examples" in text
    if line in ("", "topology"):
        assert cli(line) == text


@pytest.mark.slow
def test_every_example_runs(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "links.json").write_text(json.dumps(links(8, 4)))
    texts = [app.EXAMPLES, topology._SHOW, topology._COMPARE, simulate.EXAMPLES, plan.EXAMPLES, doctor.EXAMPLES]
    lines = {line for text in texts for line in text.splitlines() if line.startswith("decent-dp ")}
    alone = {line for line in lines if line.split()[1] not in ("launch", "watch", "roster", "status", "kill")}  # without a run
    assert len(alone) > 10
    for line in alone:
        words = line.removeprefix("decent-dp ")
        if words.startswith("simulate"):
            words += " --steps 2"
        elif words.startswith("plan"):
            words += " --top 1"
        assert cli(words), line


def test_without_matplotlib_nothing_is_begun(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "a.png"
    out, err, code = cli.all("topology show ring -n 4 --plot", str(path))
    assert (code, out) == (1, "")
    assert err.startswith("decent-dp: plots need matplotlib; pip install 'decent-dp[plots]', or in a clone")
    assert not path.exists()


def test_errors_that_are_not_about_the_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import decent_dp.tools.analysis as analysis

    def raising(error: BaseException) -> Any:
        def analyse(*_: Any, **__: Any) -> None:
            raise error

        return analyse

    for error in (RuntimeError("no\n  luck"), OSError("no luck"), ImportError("no luck")):
        monkeypatch.setattr(analysis, "analyse", raising(error))
        assert cli.all("topology show ring -n 4") == ("", "decent-dp: no luck\n", 1)
    for stop in (KeyboardInterrupt(), typer.Abort()):  # some versions of typer make one of the other
        monkeypatch.setattr(analysis, "analyse", raising(stop))
        assert cli.all("topology show ring -n 4") == ("", "", 130)
    for bug in (ValueError("a bug"), KeyError("a bug")):
        monkeypatch.setattr(analysis, "analyse", raising(bug))
        with pytest.raises(type(bug), match="a bug"):
            main(["topology", "show", "ring", "-n", "4"])


@pytest.mark.parametrize("fault", [RecursionError, NotImplementedError])
def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch, fault):
    """Both are RuntimeErrors, and other RuntimeErrors are messages to the user."""

    def fail(**_: Any) -> None:
        raise fault("deep inside")

    monkeypatch.setattr(typer.main, "get_command", lambda _: SimpleNamespace(main=fail))
    with pytest.raises(fault, match="deep inside"):
        main(["plan"])
