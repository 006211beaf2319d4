"""Draws what a GPU does in updates beside exchanges: ``python -m benchmarks.gpu.picture gpu.json`` writes gpu.png beside it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw"]

# Kinds of spans (``speed.spans``), from the top.
ROWS = {
    "computation": ("computation", "tab:blue"),
    "exchange": ("coding and mixing, on the same stream", "tab:red"),
    "to the CPU": ("copies to the CPU", "tab:green"),
    "to the GPU": ("copies to the GPU", "tab:olive"),
    "exchange, beside": ("comparing of messages", "tab:purple"),
}


def draw(rows: Sequence[dict[str, Any]], device: str, path: Path) -> None:
    """Draws each case with spans, one below the other.

    Args:
        rows: of the JSON of ``make gpu``.
        device: its name, for the title.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = [
        (row["case"].removeprefix("speed: "), row["figures"]["spans"]) for row in rows if "spans" in row.get("figures", {})
    ]
    if not cases:
        return
    figure = Figure(figsize=(10, 2.2 * len(cases) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{device}: updates, and exchanges with a worker on the CPU over the loopback")
    axes = figure.subplots(len(cases), 1, squeeze=False)[:, 0]
    for axis, (name, spans) in zip(axes, cases, strict=True):
        for place, (kind, (_, color)) in enumerate(ROWS.items()):
            bars = [(begin, max(end - begin, 0.3)) for found, begin, end in spans if found == kind]
            axis.broken_barh(bars, (place - 0.4, 0.8), color=color)
        axis.set_yticks(range(len(ROWS)), [label for label, _ in ROWS.values()], fontsize=8)
        axis.set_ylim(len(ROWS) - 0.5, -0.5)
        axis.set_title(name, fontsize=9, loc="left")
        axis.set_xlim(0, max(end for _, _, end in spans))
        axis.grid(axis="x", alpha=0.3)
    axes[-1].set_xlabel("milliseconds")
    figure.savefig(path, dpi=110)


def main() -> None:
    path = Path(sys.argv[1])
    report = json.loads(path.read_text())
    draw(report["rows"], report["device_name"], path.with_suffix(".png"))


if __name__ == "__main__":
    main()
