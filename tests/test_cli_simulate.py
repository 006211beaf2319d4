"""``decent-dp simulate``, and the files that commands read and write."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from decent_dp.cli.inputs import BadInputError, read_json
from decent_dp.cli.screen import number, size
from tests.test_cli import Cli, prepared


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    return prepared(capsys, monkeypatch)


# -- simulate --------------------------------------------------------------------------------------------------------------

RUN = "simulate --topology base-2 -n 6 --alpha 0.3 --steps 20 --batch 4 --lr 0.05 --optimizer momentum"
RUN += " --compression bfloat16 --mix-every 2 --no-overlap --seed 3"


def test_simulate_runs_what_was_typed(cli: Cli, tmp_path: Path) -> None:
    from decent_dp.sim.experiment import Simulation, run

    found = cli.json(RUN, "--out", str(tmp_path / "new" / "folder"))
    expected = run(
        Simulation(
            topology="base-2", n=6, alpha=0.3, steps=20, batch=4, lr=0.05, optimizer="momentum", mix_every=2,
            compression="bfloat16", overlap=False, seed=3, eval_every=2,
        )
    ).to_json()  # fmt: skip
    assert {**found, "seconds": 0} == {**expected, "seconds": 0, "diverged": None}
    assert [row["step"] for row in found["rows"]] == list(range(2, 21, 2))
    assert json.loads((tmp_path / "new" / "folder" / "simulation.json").read_text()) == found
    assert (tmp_path / "new" / "folder" / "simulation.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("columns", ["40", "80"])
def test_simulate_prints_its_rows(cli: Cli, tmp_path: Path, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    plot = tmp_path / "run.png"
    found, text = cli.json(RUN), cli(RUN, "--plot", str(plot))
    for row in found["rows"]:
        cells = [number(row["loss"]), number(row["consensus_distance"])]
        cells += [f"{100 * row[key]:.1f} %" for key in ("accuracy", "worst_accuracy")] + [size(row["bytes_sent"])]
        assert re.search(rf"^ *{' +'.join(map(re.escape, [str(row['step']), *cells]))}$", text, re.MULTILINE)
    assert re.search(r"^step +loss +consensus distance +accuracy +worst replica +sent$", text, re.MULTILINE)
    assert f"wrote {plot}" in text
    assert plot.exists()
    assert "mixed every 2 steps" in text
    # The words below the table, unfolded: what each number is of.
    words, last = " ".join(text.split()), found["rows"][-1]
    assert last["accuracy"] != last["worst_accuracy"]
    shares = [f"{100 * last[key]:.1f} %" for key in ("accuracy", "worst_accuracy")]
    assert f"accuracy {shares[0]} of the mean of all replicas, {shares[1]} of the worst" in words
    assert f"sent {size(last['bytes_sent'] / 6 / 20)} per worker and step, {found['parameters']:,} parameters" in words


DIVERGING = "simulate --topology ring -n 4 --steps 20 --batch 4 --lr 1e3"


@pytest.mark.parametrize("columns", ["40", "80"])
def test_a_run_that_diverges(cli: Cli, tmp_path: Path, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out, err, code = cli.all(DIVERGING, "--json", "--out", str(tmp_path))
    found = json.loads(out)
    assert (code, err) == (1, "decent-dp: diverged by step 2: lower --lr\n")
    assert found["diverged"] == 2
    assert found["rows"][0]["loss"] > 1000
    assert found["rows"][-1]["loss"] is None
    assert (tmp_path / "simulation.png").exists()
    text, err, code = cli.all(DIVERGING)
    assert (code, err.count("\n")) == (1, 1)
    for row in found["rows"]:
        cells = [number(row["loss"]), number(row["consensus_distance"]), f"{100 * row['accuracy']:.1f} %"]
        assert re.search(rf"^ *{row['step']} +{' +'.join(map(re.escape, cells))} ", text, re.MULTILINE)


# -- files -----------------------------------------------------------------------------------------------------------------

FILES = {
    "topology show ring -n 4 --plot": ("a.png", "ring: 4 workers"),
    "topology compare -n 4 --plot": ("a.png", "rounds: of a period"),
    "simulate --topology ring -n 4 --steps 2 --batch 2 --plot": ("a.png", "accuracy"),
    "simulate --topology ring -n 4 --steps 2 --batch 2 --out": ("run", "accuracy"),
    "doctor --out": ("links.json", "backend"),
}


@pytest.mark.parametrize("line", [line for line in FILES if "compare" not in line])
def test_a_place_that_may_not_be_written_to(cli: Cli, tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run as root, who may write everywhere: so it is the question that is answered otherwise.
    locked = tmp_path / "locked"
    locked.mkdir()
    path = locked / FILES[line][0]
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != locked or mode != os.W_OK)
    assert cli.all(line, str(path)) == (
        "", f"decent-dp: {line.split()[-1]} {path}: the folder {locked} may not be written to; give another place\n", 2
    )  # fmt: skip
    old = path / "simulation.json" if path.name == "run" else path
    old.parent.mkdir(exist_ok=True)
    old.write_text("old")
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != old or mode != os.W_OK)
    assert cli.all(line, str(path)) == (
        "", f"decent-dp: {line.split()[-1]} {old}: it may not be written to; give another place\n", 2
    )  # fmt: skip
    assert old.read_text() == "old"


@pytest.mark.parametrize("line", [line for line in FILES if not line.startswith("doctor")])
@pytest.mark.parametrize("json_", [False, True])
def test_what_was_found_is_said_before_a_file_fails(cli: Cli, tmp_path: Path, line: str, json_: bool) -> None:
    full = tmp_path / FILES[line][0]
    if full.name == "run":
        full.mkdir()
        full /= "simulation.json"
    full.symlink_to("/dev/full")
    place = full.parent if full.name == "simulation.json" else full
    out, err, code = cli.all(line, str(place), *["--json"][: int(json_)])
    assert (code, err) == (1, f"decent-dp: {full} could not be written: No space left on device; give another place\n")
    if json_:
        json.loads(out)
    else:
        assert FILES[line][1] in out


def test_files_that_hold_no_json(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    cases = [
        (b"[" * 200_000, "nested too deep"),
        (json.dumps({"a": 1}).encode("utf-16"), "is not UTF-8.*with --out FILE"),
        (b"{", "holds no JSON"),
        (b"", "holds no JSON"),
    ]
    for content, words in cases:
        path.write_bytes(content)
        with pytest.raises(BadInputError, match=words) as caught:
            read_json("--measured", path)
        assert "\n" not in str(caught.value)
    path.write_text('{"a": "µ"}', encoding="utf-8-sig")  # as some editors begin a file
    assert read_json("--measured", path) == {"a": "µ"}
