"""Where workers listen for each other, and how one finds another."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import struct
import sys

from decent_dp.transport.communicators import Rendezvous, UnreachableError

__all__ = ["dial", "listen"]

# Of nobody (RFC 5737): the way to it is the default route.
_ELSEWHERE = "192.0.2.1"


def listen(meeting: Rendezvous) -> list[socket.socket]:
    """Listens for the workers of higher rank, and says where in the store.

    Workers on this one's network stack come over a local socket, on Linux; nothing listens beyond the loopback interface
    unless some worker is elsewhere.
    """
    listeners, where = [], {}
    others = meeting.world_size - 1
    if meeting.near and sys.platform == "linux":
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.bind("")  # Linux gives it a name of its own, which is no file and goes with it
        name = local.getsockname()
        where["local"] = name[1:].decode()
        listeners.append(local)
    if len(meeting.near) < others or not listeners:
        host = "127.0.0.1" if len(meeting.near) == others else _own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        remote = socket.socket(family, socket.SOCK_STREAM)
        remote.bind((host, 0))
        where["host"], where["port"] = remote.getsockname()[:2]
        listeners.append(remote)
    for listener in listeners:
        listener.listen(1024)
        listener.setblocking(False)
    meeting.store.set(f"address/{meeting.rank}", json.dumps(where))
    return listeners


def dial(meeting: Rendezvous, peer: int) -> socket.socket:
    """A connection to ``peer``.

    Raises:
        UnreachableError: nobody answers where the peer said that it listens.
        RuntimeError: the peer has not said where it listens, within the process group's timeout.
    """
    where = json.loads(meeting.store.get(f"address/{peer}"))
    timeout = meeting.timeout.total_seconds()
    local = peer in meeting.near and "local" in where
    try:
        if not local:
            return socket.create_connection((where["host"], where["port"]), timeout)
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.settimeout(timeout)
        stream.connect(b"\0" + where["local"].encode())
        return stream
    except OSError as error:
        raise UnreachableError(None if local else f"{where['host']} port {where['port']}", str(error)) from error


def _own_address() -> str:
    """The address under which the others reach this worker: that of GLOO_SOCKET_IFNAME, or of the way to the master."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        address = _address_of(interface)
        if address is not None:
            return address
    for target in (os.environ.get("MASTER_ADDR", ""), socket.gethostname(), _ELSEWHERE):
        with contextlib.suppress(OSError):
            family, kind, _, _, to = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(to)  # sends nothing: looks the way up
                found = str(probe.getsockname()[0])
                # 'localhost' is what the master may call itself, and it is nobody's address for others.
                if not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
                    return found
    return "127.0.0.1"


def _address_of(interface: str) -> str | None:
    """The IPv4 address of a network interface; None where it cannot be told."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            siocgifaddr = 0x8915  # of Linux
            answer = fcntl.ioctl(any_socket.fileno(), siocgifaddr, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
    except (ImportError, OSError):
        return None
