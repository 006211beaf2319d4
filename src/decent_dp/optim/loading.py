"""Loading of optimizer state without torch's cast to the parameter's dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

__all__ = ["given_state", "pairs"]


@contextlib.contextmanager
def given_state(
    optimizer: Optimizer, check: Callable[[dict[str, Any]], None], restore: Callable[[dict[str, Any]], None]
) -> Iterator[None]:
    """Context manager for a call of ``load_state_dict``.

    torch casts state to the parameter's dtype, which would round float32 state of bfloat16 parameters, and shares the tensors
    that need no cast, so that two optimizers would write to one state.

    Args:
        check: called with the given dict, after the user's own pre-hooks and before anything is loaded.
        restore: called with it after the load, before the user's own post-hooks, to copy what torch has cast or shared.
    """
    given: list[dict[str, Any]] = []

    def before(_: Optimizer, state_dict: dict[str, Any]) -> None:
        check(state_dict)
        given.append(state_dict)

    hooks = (
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(lambda _: restore(given[0]), prepend=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def pairs(groups: list[dict[str, Any]], given: dict[str, Any]) -> Iterable[tuple[int, Tensor, dict[str, Any]]]:
    """(key, parameter, state) for each parameter with state in the given dict, matched by position as in torch."""
    keys = chain.from_iterable(group["params"] for group in given["param_groups"])
    params = chain.from_iterable(group["params"] for group in groups)
    states = given["state"]  # with another number of parameters torch raises
    return [(key, param, states[key]) for key, param in zip(keys, params, strict=False) if key in states]
