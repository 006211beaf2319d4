"""The transport over torch.distributed: pairs and groups side by side, and the collectives of all workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decent_dp.bucket import Envelope
from decent_dp.topo import Edge
from decent_dp.transport.base import Control, Exchange, Handle, Label, Later, Transport
from decent_dp.transport.communicators import Communicator, Notes, Rendezvous, peer_error
from decent_dp.transport.group import Groups, NcclGroups
from decent_dp.transport.inprocess import InProcessTransport
from decent_dp.transport.pairwise import NcclPairs, Pairs, StagedPairs
from decent_dp.transport.waiter import Waiter

__all__ = ["ProcessGroupTransport", "connect"]


def connect(process_group: dist.ProcessGroup | None) -> Transport:
    """The transport of this worker in ``process_group`` (None: the default group); called by all its workers together.

    Raises:
        RuntimeError: there is no process group.
        ValueError: this worker is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "there is no process group. Call decent_dp.utils.initialize_dist() (or torch.distributed.init_process_group) "
            "before wrapping the model, and start the script with torchrun for more than one worker."
        )
    if dist.get_rank(process_group) < 0:
        raise ValueError("this worker is not a member of process_group: wrap the model on its members only.")
    if dist.get_world_size(process_group) == 1:
        return InProcessTransport()
    return ProcessGroupTransport(process_group)


class ProcessGroupTransport(Transport):
    """Workers that are processes.

    One gloo communicator of all workers serves the collectives and every pair; where the process group has NCCL, a second
    one serves pairs of GPUs. A group of more than two has one of its own, made when it is first used.

    Args:
        process_group: whose workers, backend and timeout; None for the default group. All its workers call this together.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        meeting = Rendezvous.meet(process_group)
        super().__init__(meeting.rank, meeting.world_size)
        self._meeting = meeting
        self._notes = Notes(meeting.store, meeting.rank)
        self._waiter = Waiter("decent_dp-groups")
        self._communicators: dict[str, Communicator] = {}
        ranks = range(meeting.world_size)
        everybody = self._made("all", ranks, lambda: meeting.gloo("all", ranks))
        self._control = _GlooControl(everybody, self._explain_all)
        self._exchange = _ByEdge(self)
        self._pairs = Pairs(everybody, meeting.rank, self._explain)
        self._staged = StagedPairs(self._pairs, meeting.rank, self._waiter, self._explain)
        self._groups = Groups(meeting.rank, self._gloo_group, self._waiter, self._explain)

    @property
    def exchange(self) -> Exchange:
        return self._exchange

    @property
    def control(self) -> Control:
        if not self._communicators:
            raise RuntimeError("the transport was closed")
        return self._control

    def prepare(self, edges: list[Edge]) -> None:
        if self._meeting.nccl:
            return  # a communicator that is never used would still hold GPU memory: made at first use
        for edge in edges:
            if len(edge.ranks) > 2:
                self._gloo_group(tuple(sorted(edge.ranks)))

    def report(self, cause: str) -> None:
        self._notes.write(cause)

    def close(self) -> None:
        self._waiter.close()
        self._communicators.clear()
        # With the last reference the connections go.
        for name in ("_control", "_pairs", "_staged"):
            self.__dict__.pop(name, None)

    def choose(self, edge: Edge, sent: Envelope) -> Exchange:
        """Who moves this message: by the size of its edge and by where the tensors are."""
        on_gpu = sent.raw.is_cuda
        if len(edge.ranks) > 2:
            return self._nccl_groups() if on_gpu and self._meeting.nccl else self._groups
        if on_gpu and self._meeting.nccl:
            return self._nccl_pairs()
        return self._pairs if sent.raw.device.type == "cpu" else self._staged

    def _nccl_pairs(self) -> Exchange:
        everybody = range(self._meeting.world_size)
        communicator = self._made("nccl", everybody, lambda: self._meeting.nccl_communicator("nccl", everybody))
        return NcclPairs(communicator, self.rank, self._explain)

    def _nccl_groups(self) -> Exchange:
        return NcclGroups(self.rank, self._nccl_group, self._explain)

    def _gloo_group(self, ranks: tuple[int, ...]) -> Communicator:
        name = f"group/{ranks}"
        return self._made(name, ranks, lambda: self._meeting.gloo(name, ranks))

    def _nccl_group(self, ranks: tuple[int, ...]) -> Communicator:
        name = f"nccl/{ranks}"
        return self._made(name, ranks, lambda: self._meeting.nccl_communicator(name, ranks))

    def _made(self, name: str, ranks: Iterable[int], make: Callable[[], Communicator]) -> Communicator:
        if name not in self._communicators:
            try:
                self._communicators[name] = make()
            except RuntimeError as error:
                others = [rank for rank in ranks if rank != self.rank]
                what = "a communicator"
                raise peer_error(error, others, what, self._notes, self._meeting.timeout) from error
        return self._communicators[name]

    def _explain(self, error: RuntimeError, ranks: list[int], label: Label) -> RuntimeError:
        return peer_error(error, ranks, str(label), self._notes, self._meeting.timeout)

    def _explain_all(self, error: RuntimeError, what: str) -> RuntimeError:
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        return peer_error(error, others, what, self._notes, self._meeting.timeout)


class _ByEdge(Exchange):
    def __init__(self, transport: ProcessGroupTransport) -> None:
        self._transport = transport

    def start(self, edge: Edge, sent: Envelope, received: Envelope, label: Label) -> Handle:
        return self._transport.choose(edge, sent).start(edge, sent, received, label)


class _GlooControl(Control):
    def __init__(self, communicator: Communicator, explain: Callable[[RuntimeError, str], RuntimeError]) -> None:
        self._communicator, self._explain = communicator, explain

    def broadcast(self, tensor: Tensor) -> None:
        # As bytes on the CPU: any dtype, any device, any strides.
        host = tensor.detach().to("cpu").contiguous()
        raw = host.reshape(-1).view(torch.uint8)
        if raw.numel():
            self._wait(lambda: self._communicator.broadcast(raw, 0), "a broadcast from worker 0")
        tensor.detach().copy_(host)

    def gather(self, message: Any) -> list[Any]:
        text = json.dumps(message).encode()
        size, n = torch.tensor([len(text)], device="cpu"), self._communicator.size()
        sizes = [torch.zeros_like(size) for _ in range(n)]
        self._wait(lambda: self._communicator.allgather([sizes], [size]), "a gather")
        # Messages are padded to the longest: gloo gathers tensors of one shape.
        padded = torch.zeros(max(int(s) for s in sizes), dtype=torch.uint8, device="cpu")
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        texts = [torch.empty_like(padded) for _ in range(n)]
        self._wait(lambda: self._communicator.allgather([texts], [padded]), "a gather")
        return [json.loads(bytes(t[: int(s)].numpy())) for t, s in zip(texts, sizes, strict=True)]

    def mean(self, tensor: Tensor) -> Handle:
        host = tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32))
        try:
            work: Any = self._communicator.allreduce([host])
        except RuntimeError as error:
            raise self._explain(error, "a mean over workers") from error

        def finish() -> None:
            self._wait(lambda: work, "a mean over workers")
            tensor.detach().copy_(host.div_(self._communicator.size()))

        return Later(finish)

    def _wait(self, start: Callable[[], Any], what: str) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise self._explain(error, what) from error
