"""The example and the demonstration, started as a user starts them."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from examples import characters, compare, digits, wire_runs
from tests.helpers import ROOT

# Warnings are errors in the workers' own code, too; torch and scikit-learn are loaded before that would matter to them.
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(*command: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=ENVIRON, capture_output=True, text=True, timeout=timeout, check=False
    )


def torchrun(n: int, *command: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), *command, timeout=timeout)


def saved_model_is_as_accurate_as_said(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    model = digits.make_model(seed=99)
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True), strict=True)
    _, images, labels = digits.load_data()
    assert digits.accuracy(model, images, labels) == pytest.approx(result["accuracy"], abs=1e-6)
    return result


@pytest.mark.slow
def test_the_script_under_torchrun(tmp_path: Path) -> None:
    files = ["--out", str(tmp_path / "result.json"), "--save", str(tmp_path / "model.pt")]
    done = torchrun(2, "examples/digits.py", "--topology", "ring", "--epochs", "3", *files)
    assert done.returncode == 0, done.stderr
    assert "2 workers, 66 steps" in done.stdout
    assert done.stdout.count("validation accuracy") == 1  # one worker speaks
    result = saved_model_is_as_accurate_as_said(tmp_path)
    assert result["accuracy"] > 0.8
    assert result["worst_accuracy"] <= result["accuracy"] + 0.05
    assert 0 < result["consensus_distance"] < 1
    payload = 4 * sum(p.numel() for p in digits.make_model(0).parameters())
    assert payload <= result["bytes_per_step"] < 1.01 * payload
    assert [step["step"] for step in result["history"]] == list(range(1, 67))
    assert [step["step"] for step in result["history"] if step["consensus_distance"] is not None] == [22, 44, 66]
    assert result["history"][-1]["loss"] < result["history"][0]["loss"]


@pytest.mark.slow
def test_the_script_alone(tmp_path: Path) -> None:
    files = ["--out", str(tmp_path / "result.json"), "--save", str(tmp_path / "model.pt")]
    done = start("examples/digits.py", "--epochs", "2", "--optimizer", "accum-adamw", *files)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result = saved_model_is_as_accurate_as_said(tmp_path)
    assert result["workers"] == 1
    assert result["accuracy"] == result["worst_accuracy"] > 0.8
    assert result["consensus_distance"] == result["bytes_per_step"] == 0


@pytest.mark.slow
def test_the_demonstration_from_end_to_end(tmp_path: Path) -> None:
    short = ["--workers", "2", "--epochs", "1", "--rounds", "1", "--steps", "2", "--out", str(tmp_path)]
    done = start("-m", "examples.compare", *short, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "gossip() on five topologies, and the wrapper" in done.stdout
    for name in ("PyTorch DDP", "base-2", "base-2, wrapper", "complete", "ring", "one-peer-exp", "alternating-exp-ring"):
        assert f"\n{name} " in done.stdout  # in the table
    results = json.loads((tmp_path / "digits.json").read_text())
    named = {line["contender"] for line in results["table"]}
    assert named == {"PyTorch DDP", "base-2, wrapper", "base-2", "complete", "ring", "one-peer-exp", "alternating-exp-ring"}
    assert len(results["table"]) == 2 * len(named)
    assert results["workers"] == 2
    lines = {(line["contender"], line["optimizer"]): line for line in results["table"]}
    # The same model, data, seed and number of steps.
    assert {len(line["accuracy_by_seed"]) for line in lines.values()} == {1}
    assert lines["PyTorch DDP", "AdamW"]["ratio_to_ddp"] == 1
    rows = json.loads((tmp_path / "digits_rows.json").read_text())
    assert len(rows) == 14 * 22
    first = {row["run"]: row["loss"] for row in rows if row["step"] == 1}
    assert len({round(loss, 5) for loss in first.values()}) == 1
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("script", "missing"),
    [
        ("examples/digits.py", "sklearn.datasets"),
        ("examples/slurm/train.py", "sklearn.datasets"),
        ("examples/compare.py", "rich"),
        ("benchmarks/net.py", "rich.console"),
    ],
)
def test_a_script_without_its_extra_says_what_to_install(script: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=r"needs? .*; in the clone of the repository: pip install -e '\.\[(demo|examples)\]'$"):
        runpy.run_path(str(ROOT / script))


def event(name: str, optimizer: str, seed: int, accuracy: float, distance: float = 0.01) -> dict[str, Any]:
    history = [{"step": 1, "loss": 2.0, "consensus_distance": None}, {"step": 2, "loss": 1.0, "consensus_distance": distance}]
    result = {
        "accuracy": accuracy,
        "worst_accuracy": accuracy - 0.01,
        "consensus_distance": distance,
        "bytes_per_step": 2000.0,
        "history": history,
    }
    return {"event": "trained", "name": name, "optimizer": optimizer, "seed": seed, "result": result}


def timed(name: str, optimizer: str, *times: float) -> list[dict[str, Any]]:
    return [{"event": "timed", "name": name, "optimizer": optimizer, "round": turn, "ms": ms} for turn, ms in enumerate(times)]


EVENTS = [
    {"event": "plan", "runs": 8, "workers": 4},
    event("PyTorch DDP", "AdamW", 0, 0.96, distance=0.0),
    event("ring", "AdamW", 0, 0.94),
    event("PyTorch DDP", "AdamW", 1, 0.98, distance=0.0),
    event("ring", "AdamW", 1, 0.96),
    *timed("PyTorch DDP", "AdamW", 2.0, 4.0, 9.0),
    *timed("ring", "AdamW", 1.0, 4.4, 9.9),
]


def test_the_table() -> None:
    ddp, ring = compare.make_lines(EVENTS)
    assert (ddp["contender"], ring["contender"]) == ("PyTorch DDP", "ring")
    assert ring["accuracy"] == pytest.approx(0.95)
    assert ring["accuracy_by_seed"] == [0.94, 0.96]
    assert (ddp["ms_per_step"], ring["ms_per_step"]) == (4.0, 4.4)
    assert ring["ratio_to_ddp"] == pytest.approx(1.1)
    table = compare.make_table([ddp, ring])
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(table)
    text = console.export_text()
    assert "…" not in text
    assert "ring" in text
    assert "95.00%" in text
    markdown = compare.make_markdown(compare.HEADINGS, [compare.cells(ring)])
    assert markdown.splitlines()[2] == ("| ring | AdamW | 95.00% | 94.00% | 1.0e-02 | 2 | 4.40 | 1.10 |")


# -- wires ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_characters_alone(tmp_path: Path) -> None:
    files = ["--out", str(tmp_path / "result.json"), "--save", str(tmp_path / "model.pt")]
    done = start("examples/characters.py", "--steps", "12", "--compression", "int8", *files)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "1 workers, 12 steps" in done.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert [step["step"] for step in result["history"]] == list(range(1, 13))
    assert result["history"][-1]["loss"] < result["history"][0]["loss"]
    model = characters.make_model(seed=99)
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), strict=True)
    assert characters.loss_on(model, characters.load_data()[1]) == pytest.approx(result["validation_loss"], abs=1e-5)


@pytest.mark.slow
def test_every_compression_from_end_to_end(tmp_path: Path) -> None:
    short = ["--workers", "2", "--seeds", "0", "--topologies", "one-peer-exp", "--epochs", "1", "--steps", "4"]
    done = start("-m", "examples.wires", *short, "--out", str(tmp_path), timeout=200)
    assert done.returncode == 0, done.stderr
    assert "One seed says nothing about noise" in done.stdout
    text = (tmp_path / "wires.json").read_text()
    assert str(ROOT) not in text
    results = json.loads(text)
    assert results["workers"] == 2
    assert len(results["table"]) == 4 + 3  # the characters have no accuracy
    for line in results["table"]:
        assert list(line["wires"]) == wire_runs.WIRES
        values = {wire: cell["mean"] for wire, cell in line["wires"].items()}
        if line["measure"] == "bytes_per_step":
            assert values["bfloat16"] == pytest.approx(values["float32"] / 2, rel=0.02)
            assert values["int8"] == pytest.approx(values["float32"] / 4, rel=0.04)
        else:  # the wires are seen, but so short a training cannot go elsewhere
            assert values["bfloat16"] == pytest.approx(values["float32"], rel=0.05)
            assert values["int8"] == pytest.approx(values["float32"], rel=0.05)
    assert "± " not in (tmp_path / "wires.md").read_text()
    assert (tmp_path / "wires.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_adapter_example_is_resumed_exactly(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    command = ["examples/lora_trainer.py", "--small", "--out", str(tmp_path)]
    first = torchrun(2, *command, timeout=300)
    assert first.returncode == 0, first.stderr
    for stage in ("code", "manual"):
        [(before, after)] = re.findall(rf"{stage}: loss (\S+) before, (\S+) after \d+ steps", first.stdout)
        assert float(after) < float(before) - 0.1
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    assert "model.safetensors" not in files
    # As if it was stopped after the first checkpoint of the second stage.
    shutil.rmtree(tmp_path / "adapter")
    shutil.rmtree(tmp_path / "manual" / "checkpoint-100")
    second = torchrun(2, *command, timeout=300)
    assert second.returncode == 0, second.stderr
    assert "code:" not in second.stdout
    assert f"manual: continued from checkpoint-50, {after} after 100 steps" in second.stdout
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
