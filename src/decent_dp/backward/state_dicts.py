"""The wrapper's state dicts: copies in place of views of buckets, and names with the prefixes of wrappers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from decent_dp.replica.module_hooks import state_names

__all__ = ["copy_values", "insert_module", "strip_prefix"]

# Prefixes of names in state dicts of wrappers: of an earlier decent_dp, and of PyTorch DDP.
_PREFIXES = ("_model.", "module.")


def copy_values(state: dict[str, Any], prefix: str) -> None:
    """Replaces views by copies: a view would change with the next step, and saving it would save the whole bucket."""
    copies: dict[int, Tensor] = {}
    for key, value in state.items():
        # With keep_vars=True the caller has asked for the parameters themselves.
        if key.startswith(prefix) and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            identity = value.data_ptr() if value.numel() else id(value)
            copy = copies.get(identity)
            if copy is None or (copy.shape, copy.stride(), copy.dtype) != (value.shape, value.stride(), value.dtype):
                copy = copies[identity] = value.detach().clone()
            state[key] = copy


def strip_prefix(state: dict[str, Any], prefix: str, expected: Iterable[str], insert: str = "") -> None:
    """Renames, in place, the keys after ``prefix`` that a wrapper had prefixed, if none of the ``expected`` names is there
    without it. ``insert`` is put between ``prefix`` and the name."""
    expected = set(expected)
    names = [key[len(prefix) :] for key in state if key.startswith(prefix)]
    strip = ""
    if not any(name in expected for name in names):
        strip = next((p for p in _PREFIXES if any(n.startswith(p) and n[len(p) :] in expected for n in names)), "")
    if not strip and not insert:
        return
    for name in names:
        state[prefix + insert + name.removeprefix(strip)] = state.pop(prefix + name)


def insert_module(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load hook of a wrapper inside a larger module: moves the model's keys under the child ``module``, where torch looks."""
    strip_prefix(state, prefix, state_names(wrapper.get_submodule("module")), insert="module.")
