"""Hooks on a model that follow its saves and loads, and refuse PyTorch DDP around it."""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

__all__ = ["HookedModel", "called_first", "state_names"]

_log = logging.getLogger(__name__)


class HookedModel(ABC):
    """Follows the saves and loads of a model, and refuses PyTorch DDP around it. The hooks refer to this object weakly.

    Args:
        in_ddp: whether DDP around the model averages over the workers of a replica, as it should.

    Attributes:
        hooks: the handles of all hooks, also of those that subclasses add.
    """

    def __init__(self, model: nn.Module, *, in_ddp: bool) -> None:
        self.model = model
        # A state dict without a key of the model: the place of the model in it, and the names that it has there.
        self._unfit: tuple[str, list[str]] | None = None
        self.hooks: list[Any] = []
        me, modules = weakref.ref(self), list(model.modules())
        known = frozenset(map(id, modules))
        module: Any  # torch does not type the hooks
        for module in modules:
            self.hooks += [
                module.register_state_dict_pre_hook(_Hook(me, known, lambda own, *_: own._before_save())),
                module.register_state_dict_post_hook(_Hook(me, known, lambda own, *args: own._after_save(*args[:3]))),
                module.register_load_state_dict_pre_hook(_Hook(me, known, HookedModel._pre_load)),
                module.register_load_state_dict_post_hook(_Hook(me, known, HookedModel._post_load)),
            ]
        for module in () if in_ddp else called_first(model):
            self.hooks.append(module.register_forward_pre_hook(_ForwardHook(me, known, _refuse_ddp)))

    @abstractmethod
    def _before_save(self) -> None:
        """Called before the values of a module are read."""

    def _after_save(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:  # noqa: B027  # needs nothing
        """Called when the values of ``module`` and its descendants are in ``state``, under ``prefix``."""

    @abstractmethod
    def _before_load(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Called before ``state`` is copied into the module's own parameters; children have their own calls."""

    @abstractmethod
    def _after_load(self) -> None:
        """Called when a module and its descendants have been loaded."""

    def _pre_load(self, module: nn.Module, state: dict[str, Any], prefix: str, local: Any, *_: Any) -> None:
        if (local or {}).get("assign_to_params_buffers"):
            raise ValueError(
                "load_state_dict(assign=True) would put other tensors in the place of those that train and mix. Load with "
                "assign=False: the values are copied into them."
            )
        self._before_load(module, state, prefix)
        if module is self.model:
            names = [key[len(prefix) :] for key in state if key.startswith(prefix)]
            # A larger module may be loaded in parts.
            unfit = (names or not prefix) and set(state_names(module)).isdisjoint(names)
            self._unfit = (prefix, names) if unfit else None

    def _post_load(self, module: nn.Module, incompatible: Any) -> None:
        self._after_load()
        if module is not self.model or self._unfit is None:
            return
        prefix, names = self._unfit
        # Modules may take keys by other names: those of an older version, or of what a wrapper inside the model contains.
        if {prefix + name for name, _ in module.named_parameters()}.issubset(incompatible.missing_keys):
            # strict=False takes it as if it had been loaded. With strict=True torch tells no hook, and raises an error.
            _log.warning(
                "no key of the state dict fits the model, so nothing is loaded: %s, and the model's first is %r. Keys that are "
                "saved here have no prefix ('_model.', 'module.') that would have to be cut off.",
                f"its first is {names[0]!r}" if names else "it is empty",
                next(state_names(module)),
            )


def state_names(model: nn.Module) -> Iterator[str]:
    """Yields the names of all parameters and buffers; tied tensors have several."""
    for named in (model.named_parameters, model.named_buffers):
        yield from (name for name, _ in named(remove_duplicate=False))


def called_first(model: nn.Module) -> Iterator[Any]:
    """Yields the modules whose forward users call: the model, or the parts of one without a forward (a ModuleDict)."""
    if type(model).forward is not nn.Module.forward:
        yield model
    else:
        for child in model.children():
            yield from called_first(child)


def _refuse_ddp(own_model: HookedModel, module: nn.Module, *_: Any) -> None:
    around: nn.Module = DistributedDataParallel._active_ddp_module  # type: ignore[assignment]
    own = set(map(id, module.parameters()))
    if any(id(param) in own for param in around.parameters()):
        raise RuntimeError(
            "PyTorch's DistributedDataParallel is around this model, which decent_dp trains: it would average gradients over "
            "all workers in every backward, and put back those that an update has used. Do not wrap the model in it (over the "
            "workers of a node: before gossip()). Where "
            "Accelerate wraps it (the Trainer of transformers, too), leave the model out of accelerator.prepare(), or call "
            "accelerator.prepare_model(model, evaluation_mode=True). With Ray Train call prepare_model(model, "
            "parallel_strategy=None)."
        )


class _Hook:
    """A module hook that has no effect on copies and pickles of the model.

    A deep copy of the model shares the hook, which ignores unknown modules. A pickle contains a hook that does nothing.
    """

    def __init__(self, owner: weakref.ref[Any], known: frozenset[int], call: Callable[..., None]) -> None:
        self._owner, self._known, self._call = owner, known, call

    def __call__(self, module: nn.Module, *args: Any) -> None:
        owner = self._owner()
        if owner is not None and id(module) in self._known:
            self._call(owner, module, *args)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return self

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return (_no_hook, ())


class _ForwardHook(_Hook):
    """A forward pre-hook that acts inside a forward of PyTorch DDP."""

    def __call__(self, module: nn.Module, *args: Any) -> None:
        # torch.compile traces this line, so it only reads. Removing the hook would recompile the model.
        if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
            self._inside_ddp(module, *args)

    @_disable_dynamo
    def _inside_ddp(self, module: nn.Module, *args: Any) -> None:
        super().__call__(module, *args)


def _no_hook() -> Callable[..., None]:
    """The hook in a pickle: files name this function."""
    return _nothing


def _nothing(*_: Any) -> None:
    return None
