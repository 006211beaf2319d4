"""Reads the file of ``decent-dp doctor --out FILE``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median_high
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FORMAT", "read_measured"]

FORMAT = "decent_dp-doctor-1"
# A node counts as slow if its link is this many times slower than the median node's: less is noise of the measurement.
_SLOW = 1.25


def read_measured(path: str | Path) -> dict[str, Any]:
    """The arguments of ``Cluster``, with latency (seconds) and rate (bytes per second) for its links.

    Raises:
        ValueError: see ``Cluster.from_measured``.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        return _summarize(json.loads(text))
    except OSError as error:
        why = f"cannot be read ({error.strerror or type(error).__name__})"
    except json.JSONDecodeError as error:
        why = f"is no JSON ({error})"
    except (ValueError, RecursionError) as error:
        why = str(error).splitlines()[0]
    except (KeyError, TypeError, AttributeError, OverflowError, IndexError) as error:
        why = f"is not what the doctor writes ({type(error).__name__}: {error})"
    raise ValueError(f"{path}: {why}; measure again: torchrun ... -m decent_dp doctor --out FILE")


def _summarize(data: dict[str, Any]) -> dict[str, Any]:
    if data.get("format") != FORMAT:
        raise ValueError(f"is not the doctor's: format must be {FORMAT!r}, got {data.get('format')!r}")
    nodes: list[int] = data["nodes"]
    n, local = len(nodes), nodes.count(nodes[0])
    node = np.arange(n) // local
    if n % local or nodes != [nodes[local * k] for k in node]:
        raise ValueError("nodes must have equally many workers each, with ranks one after another")
    latency, rate = _matrix(data, "latency_us", n, 0.0), _matrix(data, "mbit_s", n, 1e-3)
    across = node[:, None] != node
    inside = ~across & ~np.eye(n, dtype=bool)
    # A link that does not exist cannot limit.
    found: dict[str, Any] = {"inter": (0.0, math.inf), "intra": (0.0, math.inf)}
    if inside.any():
        found["intra"] = float(1e-6 * np.median(latency[inside])), float(np.median(rate[inside]) * 1e6 / 8)
    if across.any():
        both = np.where(across, np.minimum(rate, rate.T), 0.0)
        best = [float(both[node == k].max()) for k in range(n // local)]
        # The upper of the two in the middle: if half of the nodes are slow, the others are the usual ones.
        usual, least = median_high(best), min(best)
        between = least if usual > _SLOW * least else usual
        found["inter"] = float(1e-6 * np.median(latency[across])), between * 1e6 / 8
    # The doctor may write a backend per kind of device.
    backend = "nccl" if "nccl" in str(data.get("backend")) else "gloo"
    return {"world_size": n, "local_world_size": local, **found, "backend": backend}


def _matrix(data: dict[str, Any], name: str, n: int, least: float) -> npt.NDArray[np.float64]:
    """Of n x n numbers, with null on the diagonal."""
    values: npt.NDArray[np.float64] = np.array(data[name], dtype=np.float64)  # null becomes NaN
    if values.shape != (n, n):
        raise ValueError(f"{name} must be a matrix of {n} x {n} numbers")
    wrong = ~((values >= least) & (values <= 1e9)) & ~np.eye(n, dtype=bool)
    for i, j in np.argwhere(wrong):
        if math.isnan(values[i, j]):
            raise ValueError(f"worker {i} does not reach worker {j} ({name}[{i}][{j}] is null): mend that first")
        raise ValueError(f"{name}[{i}][{j}] must be a number from {least:g} to 1e+09, got {values[i, j]:g}")
    return values
