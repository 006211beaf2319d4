"""The strategy of Lightning's Fabric."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from decent_dp.integrations import _lightning_common  # noqa: F401  says what to install, before the imports below fail

# isort: split
from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
from torch import nn
from torch.optim import Optimizer

from decent_dp import Gossip
from decent_dp.integrations._lightning_common import (
    NOTE,
    GossipArguments,
    LightningOverSurvivors,
    load_own,
    load_replicas,
    mean_state,
    remove_replicas,
    save_replicas,
)

__all__ = ["GossipFabricStrategy"]


class GossipFabricStrategy(GossipArguments, LightningOverSurvivors, DDPStrategy):  # type: ignore[misc]
    """A strategy of Lightning's Fabric: ``fabric.setup(model, optimizer)`` calls ``decent_dp.gossip``, and wraps nothing.

    ``fabric.save`` writes the mean of the replicas, and all replicas beside the file if the state has the model and all its
    optimizers; ``fabric.load`` then resumes exactly. Evaluate with ``with fabric.strategy.replica.averaged():``.

    Args:
        topology, compression, mix_every, rule, faults, encrypt, overlap, bucket_size_in_mb, local_world_size, replica: as of
            ``decent_dp.gossip``; ``local_world_size`` None is Fabric's number of devices per node.
        arguments: ``accelerator``, ``parallel_devices``, ``cluster_environment``, ``checkpoint_io``, ``precision``,
            ``process_group_backend``, ``timeout`` and ``start_method`` of Fabric's DDPStrategy.

    Attributes:
        replicas: what ``decent_dp.gossip`` returned, one per ``setup``.

    Raises:
        TypeError: an argument is unknown, or is one of PyTorch's DDP.
    """

    PRECISION = "precision"

    def reset(self) -> None:
        self.replicas: list[Gossip] = []
        self._backward_sync_control = _NodeWindow(self)

    def current_replica(self) -> Gossip | None:
        return next((replica for replica in self.replicas if not replica.life.closed), None)

    @property
    def replica(self) -> Gossip:
        """The only replica.

        Raises:
            RuntimeError: there is none yet, or there are several: use ``replicas``.
        """
        if len(self.replicas) != 1:
            raise RuntimeError(
                f"there are {len(self.replicas)} replicas: call fabric.setup(model, optimizer) once, or use strategy.replicas."
            )
        return self.replicas[0]

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        self.replicas.append(self.make_replica(module, optimizers))
        return module, optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wraps nothing."""
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        raise RuntimeError("a round follows an optimizer's step: set both up together, fabric.setup(model, optimizer).")

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        own = [replica for replica in self.replicas if replica.model is module and not replica.life.closed]
        return mean_state(own, partial(super().get_module_state_dict, module))

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        """Writes the file, with the mean, and the replicas that are in ``state`` beside it. Called by all workers."""
        replicas = self._replicas_in(state)
        if not replicas:
            super().save_checkpoint(path, state, storage_options=storage_options, filter=filter)
            remove_replicas(self, path)  # of an earlier save of this name
            return
        converted = self._convert_stateful_objects_in_state(state, filter=filter or {})
        own = {key: value for key, value in converted.items() if not isinstance(state[key], (nn.Module, Optimizer))}
        save_replicas(self, path, replicas, own, converted, storage_options)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads the file and, into replicas that are in ``state``, what was saved beside it. Called by all workers."""
        remainder: dict[str, Any] = super().load_checkpoint(path, state, strict=strict, weights_only=weights_only)
        replicas = self._replicas_in(state)
        if NOTE not in remainder or not replicas:
            return remainder
        note = remainder.pop(NOTE)
        for key, value in load_own(self, path, note, weights_only).items():
            if key not in state:
                remainder[key] = value
            elif hasattr(state[key], "load_state_dict"):
                state[key].load_state_dict(value)
            else:
                state[key] = value
        load_replicas(self, path, note, replicas)
        return remainder

    def _replicas_in(self, state: Any) -> dict[str, Gossip]:
        """The replicas of which ``state`` has the model and all optimizers, by the model's name there."""
        names = {id(value): name for name, value in state.items()} if isinstance(state, dict) else {}
        return {
            names[id(r.model)]: r
            for r in self.replicas
            if not r.life.closed and all(id(part) in names for part in (r.model, *r.optimizers))
        }

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register("gossip", cls, description="decent_dp: mixes with neighbours", override=True)


class _NodeWindow:
    """``fabric.no_backward_sync``: gradients are averaged inside a node only, if that is a replica."""

    def __init__(self, strategy: GossipFabricStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        found = [replica for replica in self._strategy.replicas if replica.model is module and not replica.life.closed]
        return found[0].no_sync() if enabled and found else contextlib.nullcontext()


GossipFabricStrategy.register_strategies(STRATEGY_REGISTRY)
