"""The replicas' parameters and buffers, stacked: replica i is row i of every tensor."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from decent_dp.arguments import FLOAT_DTYPES, check_model

__all__ = ["Stack"]

# Elements that are worked on at once in float64.
_CHUNK = 2**22


class Stack:
    """n replicas of one model.

    Args:
        model: what they are copies of; copied itself, never changed.
        n: how many.

    Attributes:
        template: the copy, as it was at construction: what runs are copies of it, so that nothing that a forward leaves behind
            is ever in it.
        names: of the trainable parameters, in registration order; one name for a tied parameter.
        params: of the trainable parameters, (n, *shape). In memory the replicas lie one after another, each with the strides
            of its parameter.
        frozen: of the others, likewise.
        buffers: likewise.

    Raises:
        TypeError, ValueError: ``model`` is nothing that can be copied or trained; names the parameter.
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

    def row(self, i: int) -> dict[str, Tensor]:
        """Replica i's tensors by name: views."""
        return {name: tensor[i] for name, tensor in self.values().items()}

    @torch.no_grad()
    def replica(self, i: int) -> nn.Module:
        """A model of its own with replica i's values."""
        return self._model(self.row(i))

    @torch.no_grad()
    def mean(self) -> nn.Module:
        """A model of its own with the mean of all floating-point parameters and buffers; of others those of replica 0."""
        values = {}
        for name, tensor in self.values().items():
            if tensor.dtype in FLOAT_DTYPES:
                values[name] = tensor.mean(0)  # torch sums narrow types in float32
            else:
                values[name] = tensor[0]
        return self._model(values)

    @torch.no_grad()
    def squared_distances(self) -> Tensor:
        """Each replica's squared L2 distance to the mean, over the trainable parameters; (n,), float64."""
        total = torch.zeros(self.n, dtype=torch.float64)
        for param in self.params.values():
            mean = param.mean(0, dtype=torch.float64)
            at_once = max(1, _CHUNK // max(1, mean.numel()))
            for first in range(0, self.n, at_once):
                apart = param[first : first + at_once].to(torch.float64) - mean
                total[first : first + at_once] += apart.square().reshape(len(apart), -1).sum(1).cpu()
        return total

    def values(self) -> dict[str, Tensor]:
        """All tensors by name, (n, *shape), detached: the values themselves."""
        return {name: tensor.detach() for name, tensor in (*self.params.items(), *self.frozen.items(), *self.buffers.items())}

    def _model(self, values: dict[str, Tensor]) -> nn.Module:
        model = copy.deepcopy(self.template)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(values[name])
        return model


def _copy(model: nn.Module) -> nn.Module:
    """A copy that does what the model does. Raises ValueError where it would not."""
    for name, param in model.named_parameters():
        if getattr(param, "_backward_hooks", None) or getattr(param, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter '{name}' has a hook on its gradient, which copies of the model would not have: remove it, and do "
                "what it does in loss_fn or in the optimizer"
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
