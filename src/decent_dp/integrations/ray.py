"""Ray Train: ``TorchTrainer(train_loop, torch_config=GossipConfig(), ...)``, with ``decent_dp.gossip`` in the train loop."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

from decent_dp._checks import check_choice, check_number, install_hint
from decent_dp.transport.addresses import address_of

_NEEDS = f"decent_dp.integrations.ray needs Ray Train 2.60 or newer; {install_hint('ray')}"
try:
    import ray

    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < (2, 60):
        raise ImportError(f"ray {ray.__version__} is installed")
    import ray.util
    from ray.train.torch import TorchConfig
except ImportError as error:
    raise ImportError(f"{_NEEDS} ({error})") from error

__all__ = ["GossipConfig"]

_LOOPBACK = "127.0.0.1"
_TorchBackend: Any = TorchConfig().backend_cls


@dataclass
class GossipConfig(TorchConfig):  # type: ignore[misc, unused-ignore]
    """Ray's ``TorchConfig``, with a process group that suits ``decent_dp.gossip``.

    Gloo and the exchanges of gossip() use the network interface whose address Ray uses for the node, or the loopback interface
    if all workers are on one node. Gloo alone would use the address of the host name, which other nodes often cannot reach. A
    ``GLOO_SOCKET_IFNAME`` in the workers' environment takes precedence.

    Args:
        backend: 'gloo' or 'nccl'; None for NCCL if each worker has GPUs, else gloo. Workers that share a GPU need 'gloo'.
        timeout_s: seconds after which a worker that waits for another one raises; it bounds how long a worker that hangs can
            hold up the run. Ray's own default is half an hour.

    Raises:
        ValueError, TypeError: an argument is wrong.
    """

    timeout_s: int = 600

    def __post_init__(self) -> None:
        if self.backend is not None:
            check_choice("backend", self.backend, ("gloo", "nccl"))
        check_number("timeout_s", self.timeout_s, "a number of seconds above 0", above=0)

    @property
    def backend_cls(self) -> Any:
        """The class by which Ray starts and ends the process group."""
        return _GossipBackend


class _GossipBackend(_TorchBackend):  # type: ignore[misc, unused-ignore]
    """Runs in Ray's controller, also before each restart of the workers."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        gpus = worker_group.get_resources_per_worker().get("GPU", 0)
        if backend_config.backend == "nccl" and gpus < 1:
            raise RuntimeError(
                f"backend='nccl' needs a whole GPU for each worker, and ScalingConfig gives each {gpus:g}: set use_gpu and "
                "resources_per_worker, or pass GossipConfig(backend='gloo'), which can share GPUs."
            )
        nodes = set(worker_group.execute(ray.util.get_node_ip_address))
        worker_group.execute(_choose_interface, len(nodes) == 1)
        super().on_start(worker_group, backend_config)


def _choose_interface(one_node: bool) -> None:
    """Makes gloo, and the exchanges, use this node's interface to the others. Runs in a worker."""
    own = _LOOPBACK if one_node else ray.util.get_node_ip_address()
    name = next((name for _, name in socket.if_nameindex() if address_of(name) == own), None)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
