"""States of the random generators that training draws from: Python's, NumPy's, torch's of the CPU and the model's GPUs."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from decent_dp.errors import CheckpointError
from decent_dp.serialization import MALFORMED

__all__ = ["check_random_states", "random_states", "set_random_states"]

# Replicas that are threads share the generators.
_LOCK = threading.Lock()

# Of the Mersenne Twister, which Python, NumPy and torch use.
_WORDS = 624
# torch's state has, in the order of the bytes: seed, left and seeded (32 bits each), next, and the words. A draw reads word
# `next` until `left`, which is counted down, is 0.
_TORCH_HEADER = 24


def random_states(model: nn.Module) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    return {
        "python": [version, np.array(words, dtype=np.int64), gauss],
        "numpy": dict(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(index) for index in _gpus(model)],
    }


def check_random_states(states: Any, model: nn.Module, file: Path) -> None:
    """Tries ``set_random_states``, and leaves the generators as they are.

    Raises:
        CheckpointError: it would fail, or the next draw would; names the file.
    """
    with _LOCK:
        own = random_states(model)
        try:
            set_random_states(states, model)
            _check_positions(states)
        except MALFORMED as error:
            raise CheckpointError(
                f"{file} cannot be used: its random states do not fit the generators here ({type(error).__name__}: {error}): "
                "use the kinds of generators that it was saved with"
            ) from error
        finally:
            set_random_states(own, model)


def _check_positions(states: dict[str, Any]) -> None:
    """None of the three libraries checks all of these, and a position behind the words is a SIGSEGV at the next draw."""
    _, words, gauss = states["python"]
    if len(words) != _WORDS + 1 or not 0 <= int(words[-1]) <= _WORDS or not (gauss is None or isinstance(gauss, float)):
        raise ValueError("that of Python's generator is out of range")
    own = states["numpy"]["state"]
    if own["key"].shape != (_WORDS,) or not (isinstance(own["pos"], int) and 0 <= own["pos"] <= _WORDS):
        raise ValueError("that of NumPy's generator is out of range")
    state = states["torch"]
    if state.dtype != torch.uint8 or state.dim() != 1 or len(state) < _TORCH_HEADER + 8 * _WORDS:
        raise ValueError("that of torch's generator has another size")
    left, following = (int(state[at : at + n].view(dtype)) for at, n, dtype in ((8, 4, torch.int32), (16, 8, torch.int64)))
    if not 1 <= left <= _WORDS or not 0 <= following <= _WORDS or (left > 1 and following + left > _WORDS + 1):
        raise ValueError("that of torch's generator is out of range")


def set_random_states(states: dict[str, Any], model: nn.Module) -> None:
    """The inverse of ``random_states``. GPUs are taken in order, as their numbers may have changed."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(int(word) for word in words[: _WORDS + 2]), gauss))  # too many are refused
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    for index, state in zip(_gpus(model), states["cuda"], strict=False):
        torch.cuda.set_rng_state(state, index)


def _gpus(model: nn.Module) -> list[int]:
    """The GPUs of the model. Reading the state of another one would open it."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return sorted(device.index for device in devices if device.type == "cuda")
