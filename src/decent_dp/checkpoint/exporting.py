"""The model to keep: one plain file of the mean of all replicas, which opens without decent_dp."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from decent_dp.arguments import FLOAT_DTYPES
from decent_dp.checkpoint.files import replace_file
from decent_dp.checkpoint.folder import make_folder
from decent_dp.checkpoint.saver import Trained, replica_of
from decent_dp.compression import all_finite
from decent_dp.errors import CheckpointError, NonFiniteError
from decent_dp.replica.averages import average_, differing
from decent_dp.replica.consistency import among_the_same, call_on_all
from decent_dp.replica.replica import Replica
from decent_dp.replica.shards import is_sharded

__all__ = ["calibrate", "export"]

_SAFETENSORS = ".safetensors"
_TORCH = (".pt", ".pth", ".bin")


def export(model: Trained, path: str | Path, *, loader: Iterable[Any] | None = None) -> Path:
    """Writes the mean of all replicas as one plain state dict, with the model's own keys. Called by all workers.

    Worker 0 writes; the file is complete and durable when the call returns. Replicas, buffers, modes, torch's random state and
    the exchange in flight are as before. Inside ``with model.averaged()``, or that of an ``AveragedReplica``, the values of
    the parameters there are written.

    Args:
        model: trainable parameters and floating-point buffers are averaged, all else is worker 0's.
        path: ends in '.safetensors', for ``safetensors.torch.load_file``, or in '.pt', '.pth' or '.bin', for
            ``torch.load(weights_only=True)``. Missing folders are made.
        loader: BatchNorm's statistics are estimated for the mean model over it, as by ``calibrate``; None: they are averaged.

    Returns:
        The path.

    Raises:
        ValueError: the path ends otherwise.
        TypeError: it is not a path, or the model has an extra state that the file cannot hold.
        CheckpointError: it cannot be written.
        OutOfStepError: the workers have made different numbers of updates.
        NonFiniteError: a replica holds a NaN or an infinity. All of these on all workers.
    """
    replica = replica_of(model, "export")
    replica.begin_collective("export")
    control = replica.world.control
    file = call_on_all(control, lambda: _checked_path(path))
    with contextlib.ExitStack() as undone:
        if replica.mean.backup is None:  # else the parameters are a mean already
            undone.enter_context(replica.averaged())
        undone.enter_context(_put_back(replica.model))
        if loader is not None:
            _calibrate(replica, loader)
        _average_buffers(replica)
        written = False
        while not written:
            replica.mates.wait_for_whole_replicas()
            first = replica.agreed.replicas.workers_of(min(replica.agreed.replicas.whole(control.ranks)))
            writes = replica.world.rank == min(first)
            state = call_on_all(control, partial(_whole_state, replica, gathers=replica.world.rank in first, keep=writes))
            call_on_all(control, partial(_write, state, file) if writes else lambda: None)
            written = set(first) <= set(control.ranks)  # else one died before it said that it had
    return file


def calibrate(model: Trained, loader: Iterable[Any]) -> None:
    """Estimates BatchNorm's statistics anew, for the values that the parameters have now. Called by all workers.

    Each worker runs the model over its own ``loader``, without gradients and updates, and the statistics are averaged over
    workers, weighted by their numbers of batches: the result of ``torch.optim.swa_utils.update_bn`` over the batches of all.
    Inside ``with model.averaged()`` they belong to the mean model; they stay when it ends, unless
    ``sync_buffer_in_global_avg`` is set. ``export(..., loader=...)`` and the ``averaged()`` of an ``AveragedReplica`` put the
    old ones back. Other buffers, modes and torch's random state are as before. A model without such statistics is left as it
    is. A frozen norm, which is in eval mode while the rest trains, gets new statistics, too, and the training continues with
    them.

    Args:
        model: the wrapper, whose ``module`` is called with each batch, or the ``Gossip``, whose ``model`` is.
        loader: of tensors, or of tuples or lists that begin with one. At least one batch on every worker.

    Raises:
        ValueError: a loader gave no batch.
        TypeError: it gave something else.
        NonFiniteError: the statistics of a worker are not finite; with ``faults``: of all workers.
        OutOfStepError: the workers have made different numbers of updates. All of these on all workers, and nothing is changed.
    """
    replica = replica_of(model, "calibrate")
    replica.begin_collective("calibrate")
    _calibrate(replica, loader)


def _calibrate(replica: Replica, loader: Iterable[Any]) -> None:
    control, model = replica.world.control, replica.model
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        return
    statistics = [t for norm in norms for t in (norm.running_mean, norm.running_var) if t is not None]
    with torch.no_grad(), _put_back(model) as kept:
        own = call_on_all(control, lambda: _run(model, loader))

        def weigh() -> tuple[list[Tensor], int]:
            counts = all(map(all_finite, statistics))
            batches = control.gather(own if counts else 0)
            if not all(batches):
                bad = [rank for rank, number in zip(control.ranks, batches, strict=True) if not number]
                error = NonFiniteError(f"calibrate: a batch, or the model, holds a NaN or an infinity on workers {bad}.")
                if not any(batches):
                    raise error
                replica.monitor.refuse(error)
            share = own * len(batches) / sum(batches)
            means = [share * t.to(torch.promote_types(t.dtype, torch.float32)) for t in statistics]
            if not counts:
                torch._foreach_zero_(means)
            average_(control, means)
            return means, sum(batches)

        means, count = among_the_same(control, weigh)
        for tensor, mean in zip(statistics, means, strict=True):
            tensor.copy_(mean)
        for norm in norms:
            if norm.num_batches_tracked is not None:
                statistics.append(norm.num_batches_tracked.fill_(count))
        kept.difference_update(id(tensor) for tensor in statistics)


def _checked_path(given: object) -> Path:
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"export takes the path of the file to write, got {given!r}")
    path = Path(os.fspath(given))
    if path.suffix not in (_SAFETENSORS, *_TORCH):
        raise ValueError(f"export writes files that end in {_SAFETENSORS}, {', '.join(_TORCH)}, got {str(path)!r}")
    return path


@contextlib.contextmanager
def _put_back(model: nn.Module) -> Iterator[set[int]]:
    """Restores buffers, modes and torch's random state afterwards.

    Yields:
        The ids of the buffers that are restored; remove those that are to keep their new values.
    """
    modes = [(module, module.training) for module in model.modules()]
    # update_bn puts these back itself, but not after an error.
    momenta = [(module, module.momentum) for module in model.modules() if isinstance(module, _BatchNorm)]
    places = [(m, name, t) for m in model.modules() for name, t in m._buffers.items() if t is not None]
    values = {id(tensor): (tensor, tensor.detach().clone()) for _, _, tensor in places}
    kept = set(values)
    devices = {param.device.index for param in model.parameters() if param.device.type == "cuda"}
    with torch.random.fork_rng(sorted(devices)):
        try:
            yield kept
        finally:
            with torch.no_grad():
                for module, name, tensor in places:
                    module._buffers[name] = tensor
                for identity in kept:
                    tensor, value = values[identity]
                    tensor.copy_(value)
            for module, training in modes:
                module.training = training
            for norm, momentum in momenta:
                norm.momentum = momentum


def _run(model: nn.Module, loader: Iterable[Any]) -> int:
    """Estimates the statistics of ``model`` over this worker's batches, and returns their number."""
    count = 0

    def counted() -> Iterator[Any]:
        nonlocal count
        for batch in loader:
            first = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
            if not isinstance(first, Tensor):
                raise TypeError(
                    f"batch {count} of the loader must be a tensor, or a tuple or list that begins with one, to call the model "
                    f"with; got a {type(batch).__name__}. Pass a generator that yields what the model takes."
                )
            count += 1
            yield batch

    update_bn(counted(), model, next(model.parameters()).device)
    if not count:
        raise ValueError("the loader gave no batch: BatchNorm's statistics need at least one on every worker")
    return count


def _average_buffers(replica: Replica) -> None:
    """Floating-point buffers that are saved become their mean; what is equal on all workers stays bit for bit."""
    found = {
        id(tensor): tensor
        for module in replica.model.modules()
        for name, tensor in module._buffers.items()
        if tensor is not None and name not in module._non_persistent_buffers_set and tensor.dtype in FLOAT_DTYPES
    }
    buffers = list(found.values())
    whole = [buffer for buffer in buffers if not is_sharded(buffer)]
    with torch.no_grad():
        own = [*differing(replica.world.control, whole), *filter(is_sharded, buffers)]
        replica.mean.average_("export", [], own)


# -- the file ---------------------------------------------------------------------------------------------------------


def _whole_state(replica: Replica, *, gathers: bool, keep: bool) -> dict[str, Any]:
    """The model's state dict on the CPU, whole where it is sharded; empty unless it is to be kept. Called by all workers, of
    whom those of one replica gather its parts."""
    replica.parameters.locate()
    if not gathers:
        return {}
    with replica.mates.explaining():
        # A tied parameter is one tensor under all its names, and is gathered once. (Without shards they are copies already.)
        state: dict[str, Any] = replica.model.state_dict(keep_vars=replica.agreed.replicas.shards > 1)
        known: dict[int, Tensor] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                if id(value) not in known:
                    whole = value.detach().full_tensor() if is_sharded(value) else value.detach()  # type: ignore[attr-defined]
                    known[id(value)] = whole.cpu() if keep else whole.new_empty(0)
                state[key] = known[id(value)]
        return state if keep else {}


def _write(state: dict[str, Any], path: Path) -> None:
    for key, value in state.items():
        if not isinstance(value, Tensor):
            _check_extra(key, value, path)
    try:
        make_folder(path.parent)
        if path.suffix == _SAFETENSORS:
            # Each key has memory of its own: a tied parameter is written under all its names, and any reader finds it.
            plain = {key: value.contiguous().clone() for key, value in state.items()}
            replace_file(path, lambda file: save_file(plain, file, metadata={"format": "pt"}))
        else:
            replace_file(path, partial(_save, state))
    except Exception as error:  # safetensors raises one of its own for a full disk
        raise CheckpointError(f"the model could not be written to '{path}': {type(error).__name__}: {error}") from error


def _save(state: dict[str, Any], file: Path) -> None:
    with open(file, "wb") as raw:
        try:
            torch.save(state, raw)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # that the disk is full, say, of which torch's error has no word
                raise error.__context__ from None
            raise


def _check_extra(key: str, value: object, path: Path) -> None:
    """Raises TypeError if the file could not hold a module's extra state, or could not be opened safely with it."""
    cause = "only tensors fit into a safetensors file: export to a path that ends in .pt"
    if path.suffix in _TORCH:
        raw = io.BytesIO()
        try:
            torch.save(value, raw)
            raw.seek(0)
            torch.load(raw, weights_only=True)
            return
        except Exception as error:
            cause = f"torch.load(weights_only=True) would not open it ({type(error).__name__})"
    raise TypeError(f"the model's state has a {type(value).__name__} under '{key}', and {cause}")
