"""Settings of a run, validated, and arguments of PyTorch DDP, refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import NoneType
from typing import Any

from decent_dp._checks import check_integer, check_number

__all__ = ["Settings", "refuse_ddp_keywords", "workers_per_node"]

# Arguments of PyTorch DDP, with the advice for the error.
_DDP_KEYWORDS = {
    "device_ids": "leave it out and move the model to its device before wrapping it; it stays there",
    "output_device": "leave it out: outputs stay on the model's device",
    "dim": "leave it out: each worker feeds its own batch",
    "broadcast_buffers": "leave it out: buffers are local; sync_buffer_in_global_avg=True averages them in global_avg",
    "init_sync": "leave it out: parameters and buffers are broadcast from rank 0 once, at construction",
    "bucket_cap_mb": "pass bucket_size_in_mb",
    "find_unused_parameters": "leave it out: parameters may be unused at any time",
    "check_reduction": "leave it out",
    "gradient_as_bucket_view": "pass param_as_bucket_view: here parameters are views of buckets",
    "static_graph": "leave it out: graphs may change at any time",
    "delay_all_reduce_named_params": "leave it out: gradients are not reduced",
    "param_to_hook_all_reduce": "leave it out: gradients are not reduced",
    "mixed_precision": "leave it out and use torch.autocast and scaler=",
    "device_mesh": "pass process_group",
}


@dataclass(frozen=True)
class Settings:
    """Settings that must be equal on all workers. Raises ValueError or TypeError that names the argument and its value."""

    bucket_size_in_mb: float
    overlap: bool
    scaled: bool
    compression: str | None
    mix_every: int
    grad_clip_norm: float = 0.0
    sync_buffer_in_global_avg: bool = True

    def __post_init__(self) -> None:
        check_number("grad_clip_norm", self.grad_clip_norm, "0.0 (no clipping) or a positive norm", at_least=0.0)
        check_number(
            "bucket_size_in_mb", self.bucket_size_in_mb, "a number of MiB, or 0 (one bucket per parameter)", at_least=0.0
        )
        check_integer("mix_every", self.mix_every, 1, "updates")

    def signature(self) -> dict[str, Any]:
        plain = {k: v if isinstance(v, (bool, str, NoneType)) else float(v) for k, v in asdict(self).items()}
        return {**plain, "mix_every": int(self.mix_every)}


def workers_per_node(name: str, given: Any) -> int:
    """Returns the value of the argument ``name`` if given, else the launcher's ``LOCAL_WORLD_SIZE``, else 1."""
    source, value = name, given
    if value is None:
        source, value = "the environment variable LOCAL_WORLD_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1")
    try:
        if isinstance(value, (bool, float)):
            raise ValueError
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise ValueError(f"{source} must be a whole number of workers per node, at least 1, got {value!r}")
    return number


def refuse_ddp_keywords(unknown: Mapping[str, Any]) -> None:
    """Raises TypeError for unknown keyword arguments, with advice for those of PyTorch DDP."""
    for name in unknown:
        advice = _DDP_KEYWORDS.get(name)
        if advice is not None:
            raise TypeError(f"{name} is an argument of PyTorch DDP, not of DecentralizedDataParallel: {advice}.")
        if name == "wire":
            raise TypeError("wire is now called compression: pass compression=None (was 'float32'), 'bfloat16' or 'int8'.")
        raise TypeError(f"DecentralizedDataParallel got an unexpected keyword argument {name!r}")
