"""The trainable parameters of a model in a run. Changes from outside are followed or refused, never ignored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from decent_dp.engine.layout import TensorSpec
from decent_dp.replica.shards import fsdp_modules, has_unreduced_gradients, is_sharded, reshard
from decent_dp.replica.shares import Shares, parts_of

__all__ = ["Parameters"]


class Parameters:
    """The trainable parameters of one model, as they were at construction.

    Attributes:
        names: in registration order; a tied parameter has one name.
        params: the parameters.
        tensors: the parameters, or their local shards, or this worker's shares of them, as of the last ``locate``.
        numbers: the index of each name in ``names``. ``names_by_id``: the name of each parameter by its id.
        specs: of ``tensors`` at construction.
    """

    def __init__(self, model: nn.Module, shares: Shares | None = None) -> None:
        self._model, self._shares = model, shares
        self._fsdp = fsdp_modules(model)
        reshard(self._fsdp)
        self._at_construction = dict(model.named_parameters())
        trained = [(name, param) for name, param in self._at_construction.items() if param.requires_grad]
        self.names = [name for name, _ in trained]
        self.params = [param for _, param in trained]
        self._are_sharded = any(map(is_sharded, self.params))
        self.tensors = parts_of("parameter", self.params, shares)
        self.numbers = {name: number for number, name in enumerate(self.names)}
        named = zip(self.names, self.tensors, self.params, strict=True)
        self.specs = [TensorSpec.of(name, tensor, param.numel()) for name, tensor, param in named]
        self._looks = [(spec.shape, spec.dtype, spec.device) for spec in self.specs]
        self.names_by_id = {id(param): name for name, param in trained}
        self._frozen = [param for param in self._at_construction.values() if not param.requires_grad]
        self._present = list(_parameters(model))  # referenced, so that no other object gets one of their ids
        self._present_ids = list(map(id, self._present))

    def locate(self) -> list[Tensor]:
        """Updates and returns ``tensors`` (always the same list).

        FSDP's gathered copies are freed, because writes to shards would not reach them.
        """
        if self._are_sharded:
            reshard(self._fsdp)
        if self._are_sharded or self._shares is not None:
            self.tensors[:] = parts_of("parameter", self.params, self._shares)
        return self.tensors

    def gather(self) -> None:
        """The workers of a node gather all of their shares."""
        if self._shares is not None:
            self._shares.gather("parameter", range(len(self.params)))

    def refuse_unreduced(self, what: str) -> None:
        """Raises RuntimeError while FSDP holds unreduced gradients, which ``what`` would lose."""
        if has_unreduced_gradients(self._fsdp):
            raise RuntimeError(
                f"{what} was called in a window whose gradients FSDP has not reduced yet (set_requires_gradient_sync(False)), "
                "and they would be lost: call it after the window's last backward."
            )

    def check_unchanged(self) -> None:
        """Checks that the model still has the parameters that it had at construction.

        Raises:
            RuntimeError: a parameter was unfrozen, converted, replaced, added or removed since; the message names it.
        """
        # This runs in every step. Whole lists are compared first, which is cheap.
        tensors = self.locate()
        if [(t.shape, t.dtype, t.device) for t in tensors] != self._looks:
            for spec, tensor in zip(self.specs, tensors, strict=True):
                spec.check(tensor)
        for param in self._frozen:
            if param.requires_grad:
                name = next(name for name, own in self._at_construction.items() if own is param)
                raise RuntimeError(
                    f"parameter '{name}' was frozen when the workers agreed on the model and requires "
                    "a gradient now. It has no bucket and would not mix: call gossip() or the wrapper after unfreezing, or "
                    "while it is unfrozen, and freeze it then."
                )
        # named_parameters() takes several times as long as this walk.
        if [id(param) for param in _parameters(self._model)] != self._present_ids:
            known = {id(param) for param in self._at_construction.values()}
            now = dict(self._model.named_parameters())
            changed = [name for name, param in now.items() if id(param) not in known]
            changed += [name for name in self._at_construction if name not in now]
            raise RuntimeError(
                f"parameter '{(changed or ['?'])[0]}' was added, removed or replaced by another object after the "
                "workers agreed on the model. It would not mix: change values in place (param.copy_ under torch.no_grad), or "
                "call gossip() or the wrapper after the change."
            )

    def names_of(self, params: Iterable[Tensor]) -> list[str]:
        """Returns the names of those of ``params`` that are trainable parameters of this model."""
        return [self.names_by_id[id(param)] for param in params if id(param) in self.names_by_id]


def _parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters of all modules in a fixed order, including repeated ones."""
    stack: list[nn.Module] = [module]
    while stack:
        current = stack.pop()
        for param in current._parameters.values():
            if param is not None:
                yield param
        children: Mapping[str, nn.Module | None] = current._modules
        stack.extend(child for child in children.values() if child is not None)
