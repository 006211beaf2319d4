"""Started by ``wires.py`` under torchrun: trains ``digits.py`` and ``characters.py`` with each compression.

Rank 0 writes events to stdout, one JSON object per line: first the plan, then one for each run that is done.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from examples import characters, digits
from examples.contenders import machine, write_events

WIRES = ["float32", "bfloat16", "int8"]
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "one-peer-exp": {"topology": "one-peer-exp"},
    "alternating-exp-ring": {"topology": "alternating-exp-ring", "local_world_size": 2},
    "complete": {"topology": "complete"},
}


def final_loss(history: list[dict[str, float]]) -> float:
    """The training loss at the end: the mean over workers and the last tenth of the steps."""
    return statistics.fmean(step["loss"] for step in history[-max(1, len(history) // 10) :])


def train(job: str, settings: dict[str, Any], epochs: int, steps: int) -> dict[str, float]:
    """One run, in a few numbers. Called by all workers."""
    if job == "digits":
        result = digits.train(digits.Config(epochs=epochs, **settings))
    else:
        result = characters.train(characters.Config(steps=steps, **settings))
    kept = ["validation_loss", "accuracy", "bytes_per_step"]
    return {"training_loss": final_loss(result["history"]), **{key: result[key] for key in kept if key in result}}


def events(seeds: list[int], topologies: list[str], epochs: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yields all events in order. Called by all workers."""
    field = [
        {"job": job, "topology": topology, "wire": wire, "seed": seed}
        for seed in seeds
        for job in ("digits", "characters")
        for topology in topologies
        for wire in WIRES
    ]
    yield {
        "event": "plan",
        "runs": len(field),
        "machine": machine(),
        "torch": torch.__version__,
        "workers": dist.get_world_size(),
        "settings": {
            "seeds": seeds,
            "digits": {"epochs": epochs, "batch_size": digits.Config.batch_size, "lr": digits.Config.lr},
            "characters": {"steps": steps, "batch_size": characters.Config.batch_size, "lr": characters.Config.lr},
        },
    }
    for run in field:
        began = time.perf_counter()
        compression = None if run["wire"] == "float32" else run["wire"]
        settings = {**TOPOLOGIES[run["topology"]], "compression": compression, "seed": run["seed"]}
        result = train(run["job"], settings, epochs, steps)
        yield {"event": "trained", **run, "seconds": time.perf_counter() - began, "result": result}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--topologies", nargs="+", choices=list(TOPOLOGIES), default=list(TOPOLOGIES))
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--steps", type=int, default=characters.Config.steps)
    options = parser.parse_args()
    write_events(lambda: events(options.seeds, options.topologies, options.epochs, options.steps))


if __name__ == "__main__":
    main()
