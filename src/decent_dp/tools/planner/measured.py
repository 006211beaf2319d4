"""Reads the file of ``decent-dp doctor --out FILE``."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from statistics import median, median_high
from typing import Any, NoReturn

__all__ = ["FORMAT", "read_measured"]

FORMAT = "decent_dp-doctor-1"
# A node counts as slow if its link is this many times slower than the median node's: less is noise of the measurement.
_SLOW = 1.25


def read_measured(path: str | Path) -> dict[str, Any]:
    """The arguments of ``Cluster``, with latency (seconds) and rate (bytes per second) for its links.

    Raises:
        ValueError: see ``Cluster.from_measured``.
    """

    def refuse(why: str) -> NoReturn:
        raise ValueError(f"{path}: {why}; measure again: torchrun ... -m decent_dp doctor --out FILE")

    try:
        data: Any = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        refuse(f"cannot be read ({error.strerror or type(error).__name__})")
    except (ValueError, RecursionError) as error:
        refuse(f"is no JSON ({str(error).splitlines()[0]})")
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        refuse(f"is not the doctor's: format must be {FORMAT!r}, got {found!r}")
    n, nodes = data.get("world_size"), data.get("nodes")
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        refuse(f"world_size must be a whole number of at least 1, got {n!r}")
    if not isinstance(nodes, list) or len(nodes) != n or not all(type(node) is int for node in nodes):
        refuse(f"nodes must hold the node number of each of the {n} workers")
    local = next(iter(Counter(nodes).values()))
    first = list(dict.fromkeys(nodes))
    if nodes != [first[rank // local] for rank in range(n) if rank // local < len(first)] or n % local:
        refuse("nodes must have equally many workers each, with ranks one after another")
    try:
        latency = _matrix(data, "latency_us", n, 0.0, 1e9)
        rate = _matrix(data, "mbit_s", n, 1e-3, 1e9)
    except ValueError as error:
        refuse(str(error))
    # The doctor may write a backend per kind of device.
    backend = "nccl" if "nccl" in str(data.get("backend")) else "gloo"
    return {**_summarize(n, local, latency, rate), "backend": backend}


def _matrix(data: dict[str, Any], name: str, n: int, least: float, most: float) -> list[list[float]]:
    rows = data.get(name)
    if not isinstance(rows, list) or len(rows) != n or not all(isinstance(row, list) and len(row) == n for row in rows):
        raise ValueError(f"{name} must be a matrix of {n} x {n} numbers")
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            if i == j:
                continue
            if value is None:
                raise ValueError(f"worker {i} does not reach worker {j} ({name}[{i}][{j}] is null): mend that first")
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            # A range: JSON has integers that no float can hold.
            if not number or not least <= value <= most:
                raise ValueError(f"{name}[{i}][{j}] must be a number from {least:g} to {most:g}, got {str(value)[:30]}")
    return rows


def _summarize(n: int, local: int, latency: list[list[float]], rate: list[list[float]]) -> dict[str, Any]:
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    inside = [(i, j) for i, j in pairs if i // local == j // local]
    across = [(i, j) for i, j in pairs if i // local != j // local]

    def middle(matrix: list[list[float]], some: list[tuple[int, int]]) -> float:
        return median(matrix[i][j] for i, j in some)

    best: dict[int, float] = {}
    for i, j in across:
        both = min(rate[i][j], rate[j][i])
        best[i // local] = max(best.get(i // local, 0.0), both)
    # The upper of the two in the middle: if half of the nodes are slow, the others are the usual ones.
    usual, least = (median_high(best.values()), min(best.values())) if best else (math.inf, math.inf)
    between = least if usual > _SLOW * least else usual
    # A link that does not exist cannot limit.
    inter = (1e-6 * middle(latency, across), between * 1e6 / 8) if across else (0.0, math.inf)
    intra = (1e-6 * middle(latency, inside), middle(rate, inside) * 1e6 / 8) if inside else (0.0, math.inf)
    return {"world_size": n, "local_world_size": local, "inter": inter, "intra": intra}
