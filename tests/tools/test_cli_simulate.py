"""``decent-dp simulate``, and the files that commands read and write."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from decent_dp.tools.cli.screen import number, size
from tests.tools.test_cli import Cli, prepared


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    return prepared(capsys, monkeypatch)


# -- simulate --------------------------------------------------------------------------------------------------------------

RUN = "simulate --topology base-2 -n 6 --alpha 0.3 --steps 20 --batch 4 --lr 0.05 --optimizer momentum"
RUN += " --compression bfloat16 --mix-every 2 --no-overlap --momentum-tracking --seed 3"


def test_simulate_runs_what_was_typed(cli: Cli) -> None:
    from decent_dp.tools.sim.experiment import Simulation, run

    found = cli.json(RUN)
    expected = run(
        Simulation(
            topology="base-2", n=6, alpha=0.3, steps=20, batch=4, lr=0.05, optimizer="momentum", mix_every=2,
            compression="bfloat16", overlap=False, momentum_tracking=True, seed=3, eval_every=2,
        )
    )  # fmt: skip
    form = {"format": "decent_dp-simulation-1", "diverged": None}
    assert {**found, "seconds": 0} == json.loads(json.dumps({**form, **asdict(expected), "seconds": 0}))
    assert [row["step"] for row in found["rows"]] == list(range(2, 21, 2))


@pytest.mark.parametrize("columns", ["40", pytest.param("80", marks=pytest.mark.slow)])
def test_simulate_prints_its_rows(cli: Cli, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    found, text = cli.json(RUN), cli(RUN)
    for row in found["rows"]:
        cells = [number(row["loss"]), number(row["consensus_distance"])]
        cells += [f"{100 * row[key]:.1f} %" for key in ("accuracy", "worst_accuracy")] + [size(row["bytes_sent"])]
        assert re.search(rf"^ *{' +'.join(map(re.escape, [str(row['step']), *cells]))}$", text, re.MULTILINE)
    assert re.search(r"^step +loss +consensus distance +accuracy +worst replica +sent$", text, re.MULTILINE)
    assert "mix_every=2" in " ".join(text.split())
    # The words below the table, unfolded: what each number is of.
    words, last = " ".join(text.split()), found["rows"][-1]
    assert last["accuracy"] != last["worst_accuracy"]
    shares = [f"{100 * last[key]:.1f} %" for key in ("accuracy", "worst_accuracy")]
    assert f"accuracy {shares[0]} of the mean of all replicas, {shares[1]} of the worst" in words
    assert f"sent {size(last['bytes_sent'] / 6 / 20)} per worker and step, {found['parameters']:,} parameters" in words


DIVERGING = "simulate --topology ring -n 4 --steps 20 --batch 4 --lr 1e3"


@pytest.mark.parametrize("columns", ["40", pytest.param("80", marks=pytest.mark.slow)])
def test_a_run_that_diverges(cli: Cli, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out, err, code = cli.all(DIVERGING, "--json")
    found = json.loads(out)
    assert (code, err) == (1, "decent-dp: diverged by step 2: lower --lr\n")
    assert found["diverged"] == 2
    assert found["rows"][0]["loss"] > 1000
    assert found["rows"][-1]["loss"] is None
    text, err, code = cli.all(DIVERGING)
    assert (code, err.count("\n")) == (1, 1)
    for row in found["rows"]:
        cells = [number(row["loss"]), number(row["consensus_distance"]), f"{100 * row['accuracy']:.1f} %"]
        assert re.search(rf"^ *{row['step']} +{' +'.join(map(re.escape, cells))} ", text, re.MULTILINE)


# -- files -----------------------------------------------------------------------------------------------------------------

FILES = {
    "topology show ring -n 4 --plot": ("a.png", "ring: 4 workers"),
    "doctor --out": ("links.json", "backend"),
}


@pytest.mark.parametrize("line", FILES)
def test_a_place_that_may_not_be_written_to(cli: Cli, tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run as root, who may write everywhere: so it is the question that is answered otherwise.
    locked = tmp_path / "locked"
    locked.mkdir()
    path = locked / FILES[line][0]
    refused = (
        f"decent-dp: {line.split()[-1]} {path} cannot be written: give a file in a folder that exists and may be written to\n"
    )
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != locked or mode != os.W_OK)
    assert cli.all(line, str(path)) == ("", refused, 2)
    path.write_text("old")
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != path or mode != os.W_OK)
    assert cli.all(line, str(path)) == ("", refused, 2)
    assert path.read_text() == "old"
    path.unlink()
    path.mkdir()
    assert cli.all(line, str(path)) == ("", refused, 2)


@pytest.mark.parametrize("line", [line for line in FILES if not line.startswith("doctor")])
@pytest.mark.parametrize("json_", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_results_are_printed_before_a_file_fails(cli: Cli, tmp_path: Path, line: str, json_: bool) -> None:
    full = tmp_path / FILES[line][0]
    full.symlink_to("/dev/full")
    out, err, code = cli.all(line, str(full), *["--json"][: int(json_)])
    assert (code, err) == (1, f"decent-dp: {full} could not be written: No space left on device; give another place\n")
    if json_:
        json.loads(out)
    else:
        assert FILES[line][1] in out
