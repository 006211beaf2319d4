"""Traversal of a model's output."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["tensors_in"]


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yields the tensors in lists, tuples, dicts (such as ``ModelOutput``) and dataclasses, as PyTorch DDP does."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name))
