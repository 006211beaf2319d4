"""Sharded replicas (parameters are DTensors): the workers of each replica, and the local parts of tensors.

Workers at the same position in their replicas have the same part, and mix it with each other as plain tensors. The modules
of ``fully_shard`` replace sharded parameters by gathered ones during forward and backward; ``reshard`` reverts that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves

from decent_dp._dtensors import is_sharded, local, placed
from decent_dp.errors import DisagreementError
from decent_dp.transport import Replicas

__all__ = [
    "assign_replicas",
    "describe_mesh",
    "fsdp_modules",
    "has_unreduced_gradients",
    "holds_first_copy",
    "is_sharded",
    "local",
    "mesh_of",
    "param_groups_of",
    "placed",
    "placement",
    "ranks_of_mesh",
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


def ranks_of_mesh(model: object) -> list[int]:
    """The ranks, in the default group, of the workers that hold parts of this replica; none if this worker has all of it."""
    mesh = mesh_of(model)
    return [] if mesh is None else _ranks(mesh)


# -- workers of a replica ---------------------------------------------------------------------------------------------------


def describe_mesh(model: nn.Module) -> dict[str, Any] | None:
    """Describes, as JSON, the workers of this replica; None if this worker has all of it.

    Returns:
        rank   of this worker in the default group
        ranks  of all workers of the replica, sorted
        alone  whether the mesh has another dimension for replicas, of size 1

    Raises:
        ValueError: parameters lie on different workers, or cannot be mixed; names a parameter.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    sharded: list[tuple[str, Any]] = [(name, tensor) for name, tensor in named if is_sharded(tensor)]
    if not sharded:
        return None
    first, mesh = sharded[0][0], sharded[0][1].device_mesh
    ranks = _ranks(mesh)
    for name, tensor in sharded:
        if any(part.is_partial() for part in tensor.placements):
            raise ValueError(
                f"'{name}' is placed as {tensor.placements}: a Partial placement holds summands, which cannot be mixed. "
                "Redistribute it to Shard or Replicate before gossip()."
            )
        if _ranks(tensor.device_mesh) != ranks:
            raise ValueError(
                f"'{name}' lies on the workers {_ranks(tensor.device_mesh)}, and '{first}' on {ranks}: all parameters of a "
                "replica must lie on the same workers."
            )
    for name, param in model.named_parameters():
        if param.requires_grad and not is_sharded(param):
            raise ValueError(
                f"parameter '{name}' trains and is not sharded, and '{first}' is: its copies in one replica would drift apart. "
                "Call fully_shard on the whole model (after its parts), or freeze it."
            )
    # Older versions of torch do not know the root mesh of a slice.
    root = getattr(mesh, "_get_root_mesh", lambda: mesh)()
    return {"rank": mesh.get_rank(), "ranks": ranks, "alone": root.ndim > mesh.ndim and root.size() == mesh.size()}


def _ranks(mesh: Any) -> list[int]:
    found: list[int] = mesh.mesh.flatten().sort().values.tolist()
    return found


def assign_replicas(descriptions: Sequence[dict[str, Any] | None]) -> Replicas:
    """Makes the assignment from the results of ``describe_mesh`` on all workers, by rank.

    Raises:
        ValueError, DisagreementError: replicas differ in form or overlap; all workers raise the same error.
    """
    found: list[dict[str, Any]] = [one for one in descriptions if one is not None]
    if not found:
        return Replicas(tuple((rank,) for rank in range(len(descriptions))))
    if len(found) < len(descriptions):
        plain = next(rank for rank, one in enumerate(descriptions) if one is None)
        sharded = next(rank for rank, one in enumerate(descriptions) if one is not None)
        raise DisagreementError(
            f"the model is sharded on worker {sharded} (its parameters are DTensors) and not on worker {plain}: build the "
            "same model on every worker, and call fully_shard on all of them."
        )
    at = {one["rank"]: rank for rank, one in enumerate(found)}
    for rank, one in enumerate(found):
        outside = [other for other in one["ranks"] if other not in at]
        if outside:
            raise ValueError(
                f"the replica of worker {rank} lies on the ranks {one['ranks']} of the default group, and {outside} are "
                "not in the process group that mixes: process_group must be of whole replicas, or of the workers at one "
                'position of all replicas (mesh["replica"].get_group()), or left out.'
            )
    members = [tuple(at[other] for other in one["ranks"]) for one in found]
    for rank, own in enumerate(members):
        for other in own:
            if members[other] != own or rank not in own:
                raise ValueError(
                    f"worker {rank} holds a part of a replica on the workers {list(own)}, and worker {other} of one on "
                    f"{list(members[other])}: replicas must not overlap. Use the slice of one mesh: {_MESH}."
                )
    workers = tuple(sorted(set(members), key=min))
    for other_replica in workers:
        if len(other_replica) != len(workers[0]):
            raise ValueError(
                f"the replica on the workers {list(workers[0])} has {len(workers[0])} shards, and that on "
                f"{list(other_replica)} has {len(other_replica)}: all replicas must have as many. Use the slice of one "
                f"mesh: {_MESH}."
            )
    if len(workers) == 1 < len(descriptions) and not all(one["alone"] for one in found):
        raise ValueError(
            f"all {len(descriptions)} workers hold parts of one replica, so there is no other replica to mix with: "
            f"shard over an inner dimension of a mesh, {_MESH}. (With one replica on purpose: the same, with replicas = 1.)"
        )
    return Replicas(workers)


_MESH = (
    'mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=("replica", "shard")) and '
    'fully_shard(..., mesh=mesh["shard"])'
)
