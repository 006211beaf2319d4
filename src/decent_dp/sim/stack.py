"""The replicas' parameters and buffers, stacked: replica i is row i of every tensor."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from decent_dp.handed import FLOAT_DTYPES, check_model

__all__ = ["Stack"]

# Elements that are worked on at once in float64.
_CHUNK = 2**22


class Stack:
    """n replicas of one model.

    Args:
        model: what they are copies of; copied itself, never changed.
        n: how many.

    Attributes:
        template: the copy, in whose place a replica's tensors are put for a forward. Its own values are those at construction.
        names: of the trainable parameters, in registration order; one name for a tied parameter.
        params: of the trainable parameters, (n, *shape). In memory the replicas lie one after another, each with the strides
            of its parameter.
        frozen: of the others, likewise.
        buffers: likewise.

    Raises:
        TypeError, ValueError: ``model`` is nothing that can be trained; names the parameter.
    """

    def __init__(self, model: nn.Module, n: int) -> None:
        check_model(model)
        self.n = n
        self.template = copy.deepcopy(model)
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
        return {name: tensor.detach()[i] for name, tensor in self._all()}

    def rows(self, i: int) -> list[Tensor]:
        """Replica i's trainable parameters as 1-D views, in the order of their memory."""
        found = []
        for param in self.params.values():
            row = param.detach()[i]
            found.append(row.as_strided((row.numel(),), (1,), row.storage_offset()))
        return found

    @torch.no_grad()
    def replica(self, i: int) -> nn.Module:
        """A model of its own with replica i's values."""
        return self._model(self.row(i))

    @torch.no_grad()
    def mean(self) -> nn.Module:
        """A model of its own with the mean of all floating-point parameters and buffers; of others those of replica 0."""
        values = {}
        for name, tensor in self._all():
            if tensor.dtype in FLOAT_DTYPES:
                wide = torch.promote_types(tensor.dtype, torch.float32)
                values[name] = tensor.detach().mean(0, dtype=wide).to(tensor.dtype)
            else:
                values[name] = tensor.detach()[0]
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

    def _all(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.params.items()
        yield from self.frozen.items()
        yield from self.buffers.items()

    def _model(self, values: dict[str, Tensor]) -> nn.Module:
        model = copy.deepcopy(self.template)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(values[name])
        return model


def _repeated(tensor: Tensor, n: int) -> Tensor:
    """n copies one after another, each dense in memory, with its own strides where they are dense."""
    stride = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
    shape = (n, *tensor.shape)
    stacked = torch.empty_strided(shape, (max(1, tensor.numel()), *stride), dtype=tensor.dtype, device=tensor.device)
    return stacked.copy_(tensor.detach().expand(shape))
