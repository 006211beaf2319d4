"""The replicas' parameters and buffers, stacked: replica i is row i of every tensor."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from decent_dp.arguments import FLOAT_DTYPES, check_model

__all__ = ["Snapshot", "Stack"]

# Elements per float64 copy in distances: 32 MB.
_CHUNK = 2**22


class Stack:
    """n replicas of one model.

    Args:
        model: the replicas are copies of it; copied itself, never changed.
        n: the number of replicas.

    Attributes:
        template: the copy, as it was at construction. Forwards run on copies of it, so that they leave nothing behind in it.
        names: of the trainable parameters, in registration order; one name for a tied parameter.
        params: of the trainable parameters, (n, *shape). In memory the replicas lie one after another, each with the strides
            of its parameter: int8 numbers its rounding by memory order (docs/lab/log.md, "the simulator beside real workers").
        frozen: of the others, likewise.
        buffers: likewise.
        weights: of the replicas in means, (n,) in float64; None: all equal.

    Raises:
        TypeError, ValueError: ``model`` cannot be copied or trained; names the parameter.
    """

    def __init__(self, model: nn.Module, n: int) -> None:
        check_model(model)
        self.n = n
        self.template = _copy(model)
        self.template.zero_grad(set_to_none=True)
        self.params: dict[str, Parameter] = {}
        self.frozen: dict[str, Tensor] = {}
        for name, param in self.template.named_parameters():
            if param.requires_grad:
                self.params[name] = Parameter(_repeated(param, n))
            else:
                self.frozen[name] = _repeated(param, n)
        self.buffers = {name: _repeated(buffer, n) for name, buffer in self.template.named_buffers()}
        self.names = list(self.params)
        self.weights: Tensor | None = None

    def row(self, i: int) -> dict[str, Tensor]:
        """Replica i's tensors by name: views."""
        return {name: tensor[i] for name, tensor in self.values().items()}

    @torch.no_grad()
    def replica(self, i: int) -> nn.Module:
        """A new model with replica i's values."""
        return self._model(self.row(i))

    @torch.no_grad()
    def mean(self, rows: list[int] | None = None) -> nn.Module:
        """A new model with the mean over ``rows`` (None: all) of floating-point parameters and buffers, and the first one's
        other buffers."""
        # torch sums narrow types in float32.
        values = [(name, value if rows is None else value[rows]) for name, value in self.values().items()]
        mean = self.mean_of
        return self._model({name: mean(value, rows) if value.dtype in FLOAT_DTYPES else value[0] for name, value in values})

    @torch.no_grad()
    def squared_distances(self, rows: list[int] | None = None) -> Tensor:
        """The squared L2 distance of each of ``rows`` (None: of all) to their mean, over the trainable parameters; float64."""
        total = torch.zeros(self.n if rows is None else len(rows), dtype=torch.float64, device="cpu")
        for stacked in self.params.values():
            param = stacked if rows is None else stacked[rows]
            mean = self.mean_of(param, rows, torch.float64)
            size = max(1, _CHUNK // max(1, mean.numel()))
            for part, sums in zip(torch.split(param, size), torch.split(total, size), strict=True):
                sums += (part.to(torch.float64) - mean).square().reshape(len(part), -1).sum(1).cpu()
        return total

    def mean_of(self, values: Tensor, rows: list[int] | None, dtype: torch.dtype | None = None) -> Tensor:
        """The mean over ``rows``, whose values these are, by the weights."""
        if self.weights is None:
            return values.mean(0, dtype=dtype)
        weights = self.weights if rows is None else self.weights[rows]
        mean: Tensor = torch.tensordot((weights / weights.sum()).to(values.device), values.to(torch.float64), 1)
        return mean.to(values.dtype if dtype is None else dtype)

    def values(self) -> dict[str, Tensor]:
        """All tensors by name, (n, *shape), detached; not copies."""
        return {name: tensor.detach() for name, tensor in (*self.params.items(), *self.frozen.items(), *self.buffers.items())}

    def _model(self, values: dict[str, Tensor]) -> nn.Module:
        model = copy.deepcopy(self.template)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(values[name])
        return model


def _copy(model: nn.Module) -> nn.Module:
    """A copy of the model. Raises ValueError if the copy would not do what the model does."""
    for name, param in model.named_parameters():
        if getattr(param, "_backward_hooks", None) or getattr(param, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter '{name}' has a hook on its gradient, which copies of the model would not have: remove it, and do "
                "the same in loss_fn or in the optimizer"
            )
    try:
        return copy.deepcopy(model)
    except Exception as error:
        cause = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"model cannot be copied, and every replica is a copy ({type(error).__name__}: {cause}). Pass it before its first "
            "forward, and without tensors that were computed from its parameters"
        ) from error


def _repeated(tensor: Tensor, n: int) -> Tensor:
    """n copies one after another, each dense in memory, with its own strides where they are dense."""
    stride = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
    shape = (n, *tensor.shape)
    stacked = torch.empty_strided(shape, (max(1, tensor.numel()), *stride), dtype=tensor.dtype, device=tensor.device)
    return stacked.copy_(tensor.detach().expand(shape))


class Snapshot:
    """A context that restores values of tensors, and Python attributes of models, if it is left by an error.

    An attribute is restored if it was assigned, or if it is a list, deque, dict or set that was changed. Changes inside other
    objects, and outside the models, cannot be seen and stay.
    """

    def __init__(self, tensors: Iterable[Tensor], models: Sequence[nn.Module]) -> None:
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
        modules = [module for model in models for module in model.modules()]
        attributes = [value for module in modules for value in (vars(module), *vars(module).values())]
        containers: list[Any] = [value for value in attributes if isinstance(value, (dict, list, set, deque))]
        self._containers = [(container, copy.copy(container)) for container in containers]

    def __enter__(self) -> None: ...

    @torch.no_grad()
    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            return
        for container, saved in self._containers:
            container.clear()
            (container.extend if hasattr(container, "extend") else container.update)(saved)
        for tensor, value in self._tensors:
            tensor.copy_(value)
