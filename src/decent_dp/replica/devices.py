"""Checks of the devices that replicas are on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from decent_dp.replica.shards import is_sharded
from decent_dp.transport import Transport

__all__ = ["gpus_of", "refuse_wrong_device", "warn_of_shared_gpus"]

_log = logging.getLogger(__name__)


def refuse_wrong_device(model: nn.Module, transport: Transport) -> None:
    """Raises ValueError for a model on the CPU and a process group of NCCL, which is for GPUs.

    It would train, on the CPU: exchanges need no process group. The mistake is a missing ``.to("cuda")``.
    """
    # FSDP keeps shards on the CPU if it is told to.
    on_cpu = all(param.device.type == "cpu" and not is_sharded(param) for param in model.parameters())
    if transport.only_cuda and on_cpu:
        raise ValueError(
            "the model is on the CPU, and the process group's backend is NCCL, which is for GPUs: move the model before this "
            "call, with model.to('cuda') after initialize_dist() or torch.cuda.set_device(LOCAL_RANK). To train on the CPU, "
            "make the process group with backend='gloo'."
        )


def gpus_of(model: nn.Module) -> list[str]:
    """Returns the ids of the GPUs that parameters are on: the same in all processes, whatever is visible to each."""
    devices = {param.device for param in model.parameters() if param.device.type == "cuda"}
    return sorted({str(torch.cuda.get_device_properties(device).uuid) for device in devices})


def warn_of_shared_gpus(gpus: Sequence[Sequence[str]], rank: int) -> None:
    """Logs a warning for GPUs that several workers have their models on, on the first of these workers.

    Args:
        gpus: ``gpus_of``, by rank.
    """
    for gpu in gpus[rank]:
        ranks = [other for other, own in enumerate(gpus) if gpu in own]
        if len(ranks) > 1 and ranks[0] == rank:
            _log.warning(
                "the models of workers %s are on one GPU, whose memory and time they share. If each has a GPU of its own, move "
                "the model to it: model.to('cuda') after initialize_dist(), not 'cuda:0'.",
                ", ".join(map(str, ranks)),
            )
