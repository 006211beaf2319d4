"""Sharded replicas (parameters are DTensors): the local parts of tensors, and the modules of ``fully_shard``.

These replace sharded parameters by gathered ones during forward and backward; ``reshard`` reverts that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves

from decent_dp._dtensors import is_sharded, local, placed

__all__ = [
    "fsdp_modules",
    "has_unreduced_gradients",
    "holds_first_copy",
    "is_sharded",
    "local",
    "mesh_of",
    "param_groups_of",
    "placed",
    "placement",
    "refuse_stale_backward",
    "reshard",
]


def placement(tensor: Tensor) -> str:
    """Describes the placement of a DTensor with the same text on all workers; '' for other tensors."""
    if not is_sharded(tensor):
        return ""
    sharded: Any = tensor
    how = ", ".join(f"{type(part).__name__}({getattr(part, 'dim', '')})" for part in sharded.placements)
    ranks = sharded.device_mesh.mesh
    positions = torch.searchsorted(ranks.flatten().sort().values, ranks.contiguous())
    return f"placed as {how} on the workers {positions.tolist()} of each replica"


def holds_first_copy(tensor: Tensor) -> bool:
    """Whether this worker's part is the first of its copies in the replica."""
    if not is_sharded(tensor):
        return True
    sharded: Any = tensor
    here = sharded.device_mesh.get_coordinate()
    return all(not part.is_replicate() or place == 0 for part, place in zip(sharded.placements, here, strict=True))


# -- FSDP ----------------------------------------------------------------------------------------------------------------------


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Returns the modules of a model on which ``fully_shard`` was called."""
    return [module for module in model.modules() if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)]


def reshard(modules: Iterable[Any]) -> None:
    """Puts the sharded parameters back into the modules and frees gathered copies, which a write would make stale."""
    for module in modules:
        module.reshard()


def refuse_stale_backward(modules: Iterable[nn.Module], params: Sequence[Tensor]) -> list[Any]:
    """A backward raises RuntimeError if ``params`` have changed since its forward: it would gather the new values, and use
    activations of the old ones. For parameters that are not sharded torch says so itself.

    Args:
        modules: whose forwards are called.

    Returns:
        The handles of the hooks.
    """

    def versions() -> list[tuple[int, int]]:
        # A write to a DTensor counts in it alone, and one to its part there.
        return [(param._version, local(param)._version) for param in params]

    @_disable_dynamo
    def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        before = versions()

        def check(gradient: Tensor) -> None:
            if versions() != before:
                raise RuntimeError(
                    "parameters have changed between this forward and its backward (a step, average_(), averaged(), flush(), "
                    "a save or a load), and with fully_shard the backward would gather the new ones: make such calls before "
                    "the forward, or after the backward."
                )

        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(check)  # type: ignore[no-untyped-call]

    return [module.register_forward_hook(after_forward) for module in modules]


def param_groups_of(module: Any) -> list[Any]:
    """FSDP's groups of the parameters of one of ``fsdp_modules``, which are among its internals."""
    state = module._get_fsdp_state()
    return getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]


def has_unreduced_gradients(modules: Iterable[Any]) -> bool:
    """Whether FSDP has gradients that it has not reduced yet; only its internals show them."""
    for module in modules:
        groups = param_groups_of(module)
        # HSDP: gradients that are reduced within a shard group, and not yet over the replicate dimension.
        if any(getattr(group, "_partial_reduce_output", None) is not None for group in groups):
            return True
        for param in (param for group in groups for param in getattr(group, "fsdp_params", ())):
            gathered = getattr(param, "_unsharded_param", None)
            if getattr(param, "unsharded_accumulated_grad", None) is not None:
                return True
            if gathered is not None and gathered.grad is not None:
                return True
    return False


def mesh_of(model: object) -> Any:
    """The device mesh of a replica's workers; None if this worker has all of it."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    return next((tensor.device_mesh for tensor in tensors if is_sharded(tensor)), None)
