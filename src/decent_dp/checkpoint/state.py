"""What is saved beside the replica, and how what was saved is compared with what there is."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["check_random_states", "first_difference", "random_states", "set_random_states"]

# Replicas that are threads share the generators.
_ONE_AT_A_TIME = threading.Lock()


def random_states(model: nn.Module) -> dict[str, Any]:
    """The states of the generators that training draws from: Python's, NumPy's, torch's of the CPU and of the model's GPUs."""
    version, words, gauss = random.getstate()
    return {
        "python": [version, np.array(words, dtype=np.int64), gauss],
        "numpy": dict(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(index) for index in _gpus(model)],
    }


def check_random_states(states: Any, model: nn.Module) -> None:
    """Tries ``set_random_states``, and leaves the generators as they are.

    Raises:
        ValueError: it would fail.
    """
    with _ONE_AT_A_TIME:
        own = random_states(model)
        try:
            set_random_states(states, model)
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"its random states do not fit the generators here ({type(error).__name__}: {error}): use the kinds of "
                "generators that it was saved with"
            ) from error
        finally:
            set_random_states(own, model)


def set_random_states(states: dict[str, Any], model: nn.Module) -> None:
    """Puts back what ``random_states`` returned; GPUs are taken in order, whatever their numbers are now."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(int(word) for word in words), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    for index, state in zip(_gpus(model), states["cuda"], strict=False):
        torch.cuda.set_rng_state(state, index)


def _gpus(model: nn.Module) -> list[int]:
    """Those that the model is on. Of the others not even the state may be asked: that would open them."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return sorted(device.index for device in devices if device.type == "cuda")


def first_difference(saved: Any, own: Sequence[Any]) -> str | None:
    """The first tensor in which two models differ, in words; None when there is none. Both as ``model_signature`` has them.

    Strides are not compared: values are the same in any.
    """
    if not isinstance(saved, list):
        return "its manifest does not say which"
    for i in range(max(len(saved), len(own))):
        theirs, ours = (_describe(entries[i]) if i < len(entries) else "none" for entries in (saved, own))
        if theirs != ours:
            return f"tensor {i} is {theirs} there and {ours} here"
    return None


def _describe(entry: Any) -> str:
    if not isinstance(entry, (list, tuple)) or len(entry) != 6:
        return repr(entry)
    kind, name, shape, dtype, _, trained = entry
    return f"{kind} '{name}' {shape} {str(dtype).removeprefix('torch.')} ({trained})"
