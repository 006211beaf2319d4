"""Keeps watch over the wrapped model: what users do to it behind the wrapper's back is adopted or refused, never ignored."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from decent_dp.bucket import TensorSpec

__all__ = ["Guard", "insert_module", "strip_prefix"]

# What wrappers put before the names of a model: an earlier decent_dp, and PyTorch DDP.
_PREFIXES = ("_model.", "module.")


class Guard:
    """Watches one model.

    Args:
        model: the wrapped model.
        before: called before the model's tensors are saved or loaded, so that what is owed is done first.
        loaded: called with the parameters that a load is about to overwrite.

    Attributes:
        names: of the trainable parameters, in registration order; one name for a tied parameter.
        params: these parameters.
        numbers: the place of a name in ``names``.
        specs: what they were like at construction; all workers agreed on it.
    """

    def __init__(self, model: nn.Module, before: Callable[[], None], loaded: Callable[[list[nn.Parameter]], None]) -> None:
        self._model = model
        self._before, self._loaded = before, loaded
        self._at_construction = dict(model.named_parameters())
        trained = [(name, param) for name, param in self._at_construction.items() if param.requires_grad]
        self.names = [name for name, _ in trained]
        self.params = [param for _, param in trained]
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.specs = [TensorSpec.of(name, param) for name, param in trained]
        self._frozen = [param for param in self._at_construction.values() if not param.requires_grad]
        self._present = list(_parameters(model))
        self._hook()

    def check(self) -> None:
        """Looks whether the model still has the parameters that were wrapped.

        Raises:
            RuntimeError: a parameter was unfrozen, converted, replaced, added or removed since; the message names it.
        """
        for spec, param in zip(self.specs, self.params, strict=True):
            spec.check(param)
        for param in self._frozen:
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter '{self._name_of(param)}' was frozen when the model was wrapped and requires a gradient "
                    "now. It has no bucket and would neither train nor mix: wrap the model again after unfreezing (or "
                    "wrap it unfrozen and freeze it afterwards)."
                )
        # Walked by hand: named_parameters() takes several times as long, and this runs before every forward.
        present = list(_parameters(self._model))
        if len(present) != len(self._present) or any(a is not b for a, b in zip(present, self._present, strict=True)):
            known = {id(param) for param in self._at_construction.values()}
            now = dict(self._model.named_parameters())
            changed = [name for name, param in now.items() if id(param) not in known]
            changed += [name for name in self._at_construction if name not in now]
            raise RuntimeError(
                f"parameter '{(changed or ['?'])[0]}' was added, removed or replaced by another object after the model "
                "was wrapped. It would neither train nor mix: change values in place (param.copy_ under torch.no_grad) "
                "or wrap the model after the change."
            )

    def _name_of(self, param: nn.Parameter) -> str:
        return next(name for name, p in self._at_construction.items() if p is param)

    def _hook(self) -> None:
        me = weakref.ref(self)
        modules: list[Any] = list(self._model.modules())  # torch does not type the hooks
        self._hooked = {id(module) for module in modules}
        self._hooks: list[Any] = []
        for module in modules:
            self._hooks += [
                module.register_state_dict_pre_hook(_ModelHook(me, "_before_save")),
                module.register_state_dict_post_hook(_ModelHook(me, "_after_save")),
                module.register_load_state_dict_pre_hook(_ModelHook(me, "_before_load")),
            ]

    def close(self) -> None:
        """Lets go of the model."""
        for hook in self._hooks:
            hook.remove()

    def _before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if id(module) in self._hooked:
            self._before()

    def _after_save(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Makes the dict hold copies: a view of a bucket would change with the next step and be saved with all of it."""
        if module is not self._model and (prefix or id(module) not in self._hooked):
            return  # the one that was asked does it for all below it
        copies: dict[int, Tensor] = {}
        for key, value in state.items():
            # Under keep_vars the values are the parameters themselves, which the caller asked for.
            if key.startswith(prefix) and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                identity = value.data_ptr() if value.numel() else id(value)
                copy = copies.get(identity)
                if copy is None or (copy.shape, copy.stride(), copy.dtype) != (value.shape, value.stride(), value.dtype):
                    copy = copies[identity] = value.detach().clone()
                state[key] = copy

    def _before_load(self, module: nn.Module, state: dict[str, Any], prefix: str, local: Any, *_: Any) -> None:
        if id(module) not in self._hooked:
            return  # a copy of the model, which copied our hooks
        if (local or {}).get("assign_to_params_buffers"):
            raise ValueError(
                "load_state_dict(assign=True) would put other tensors in the place of the wrapped parameters. Load with "
                "assign=False: the values are copied into them."
            )
        self._before()
        if module is self._model:
            strip_prefix(state, prefix, set(_state_names(module)))
        own = [p for name, p in module._parameters.items() if p is not None and prefix + name in state]
        if own:
            self._loaded(own)


class _ModelHook:
    """A module hook that a copy or a pickle of the model does not take along.

    It holds the guard weakly and copies as itself: a deep copy of the model then calls with a module that is not ours, and
    is let pass. In a pickle it becomes a hook that does nothing.
    """

    def __init__(self, guard: weakref.ref[Guard], method: str) -> None:
        self._guard, self._method = guard, method

    def __call__(self, *args: Any) -> None:
        guard = self._guard()
        if guard is not None:
            getattr(guard, self._method)(*args)

    def __deepcopy__(self, memo: Any) -> _ModelHook:
        return self

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return (_no_hook, ())


def _no_hook() -> Callable[..., None]:
    return _nothing


def _nothing(*args: Any) -> None:
    return None


def strip_prefix(state: dict[str, Any], prefix: str, expected: Iterable[str], insert: str = "") -> None:
    """Renames, in place, the keys of a state dict that a wrapper had prefixed.

    Args:
        state: keys that start with ``prefix`` are looked at.
        prefix: where the model sits in the module that is loaded.
        expected: the model's own names. A wrapper's prefix is stripped only when none of them is there unstripped.
        insert: put between ``prefix`` and the name.
    """
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
    """A load hook for a wrapper in a larger module: the model's own keys are found where torch looks for the child
    ``module``."""
    model = wrapper.get_submodule("module")
    expected = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    strip_prefix(state, prefix, expected, insert="module.")


def _state_names(model: nn.Module) -> Iterator[str]:
    for name, _ in model.named_parameters(remove_duplicate=False):
        yield name
    for name, _ in model.named_buffers(remove_duplicate=False):
        yield name


def _parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Every parameter at every place, in a fixed order; shared modules as often as they occur."""
    stack: list[nn.Module] = [module]
    while stack:
        current = stack.pop()
        for param in current._parameters.values():
            if param is not None:
                yield param
        children: Mapping[str, nn.Module | None] = current._modules
        stack.extend(child for child in children.values() if child is not None)
