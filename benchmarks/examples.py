"""The complete examples with --small, as their users start them, and pretraining with DDP beside gossip: `make examples`.

Writes docs/results/examples.json, and the table of docs/lab/demo.md. The losses depend on the Python version, whose standard
library is the text.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
WORKERS = 4
RUNS = {
    "DDP": ["examples/pretrain_gpt.py", "--small", "--method", "ddp"],
    "gossip": ["examples/pretrain_gpt.py", "--small"],
    "images": ["examples/images_resnet.py", "--small"],
}
LOSS, ACCURACY = "validation loss of the mean model", "accuracy of the mean model"


def run(words: list[str]) -> dict[str, Any]:
    """Runs a script on all workers, which print their progress; returns its results."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
        print("torchrun --standalone --nproc-per-node", WORKERS, *words, flush=True)
        subprocess.run([sys.executable, *launcher, *words, "--out", str(file)], cwd=ROOT, env=os.environ, check=True)
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {"command": words, **found}


def make_table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of the page."""
    ddp, gossip = (runs[name]["history"] for name in ("DDP", "gossip"))
    rows = [["step", "PyTorch DDP", "gossip()", "DDP = 1"], ["---:"] * 4]
    for a, b in zip(ddp, gossip, strict=True):
        rows.append([str(a["step"]), f"{a[LOSS]:.3f}", f"{b[LOSS]:.3f}", f"{b[LOSS] / a[LOSS]:.3f}"])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> None:
    runs = {name: run(words) for name, words in RUNS.items()}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    results = {"workers": WORKERS, "cores": os.cpu_count(), "versions": versions, "runs": runs}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "examples.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    table = make_table(runs)
    (RESULTS / "examples.md").write_text(table, encoding="utf-8")
    print(table)
    print(f"photographs: {runs['images']['history'][-1][ACCURACY]:.1%} of the patches")


if __name__ == "__main__":
    main()
