"""Where workers listen for each other, and how they connect."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any

from decent_dp.transport.communicators import Rendezvous, UnreachableError, address_key
from decent_dp.transport.tcp.descriptors import own

__all__ = ["address_of", "dial", "dial_at", "listen"]

# An address that nobody has (RFC 5737): the way to it is the default route.
_ELSEWHERE = "192.0.2.1"
_LOOPBACK = "127.0.0.1"


def listen(rendezvous: Rendezvous) -> list[socket.socket]:
    """Listens for the workers of higher rank, and stores the addresses.

    On Linux, workers on this one's network stack use a local socket. If all workers are there, nothing listens beyond the
    loopback interface, but where others may come and the master's address is another.
    """
    listeners: list[socket.socket] = []
    address: dict[str, Any] = {"node": rendezvous.node, "incarnation": rendezvous.incarnation, "pid": os.getpid()}
    address["machine"] = socket.gethostname()
    others = rendezvous.world_size - 1
    if rendezvous.local and sys.platform == "linux":
        stream = own(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        stream.bind("")  # Linux chooses a name, which is no file and ends with the socket
        name = stream.getsockname()
        address["local"] = name[1:].decode()
        listeners.append(stream)
    is_far, grows = len(rendezvous.local) < others, rendezvous.places > rendezvous.world_size
    if is_far or grows or not listeners:
        host = _own_address(guess=is_far) if is_far or grows else _LOOPBACK
        family = _family_of(host)
        remote = own(lambda: socket.socket(family, socket.SOCK_STREAM))
        remote.bind((host, 0))
        address["host"], address["port"] = remote.getsockname()[:2]
        listeners.append(remote)
    for listener in listeners:
        listener.listen(1024)
        listener.setblocking(False)
    rendezvous.addresses[rendezvous.rank] = address
    rendezvous.store.set(address_key(rendezvous.rank, rendezvous.incarnation), json.dumps(address))
    return listeners


def dial(rendezvous: Rendezvous, peer: int, seconds: float, incarnation: int = 0) -> socket.socket:
    """A connection to ``peer``, which is the process of this incarnation, within about so many seconds.

    Raises:
        UnreachableError: nobody answers at the address of the peer.
        OSError: this process has no file descriptor left, or the store does not answer.
        RuntimeError: as of ``Rendezvous.address_of``.
    """
    return dial_at(rendezvous.address_of(peer, incarnation, seconds), rendezvous.node, seconds)


def dial_at(address: Mapping[str, Any], node: str, seconds: float) -> socket.socket:
    """A connection to the process that has stored this address. ``node``: of this process.

    Raises:
        UnreachableError: nobody answers there.
        OSError: this process has no file descriptor left.
    """
    is_local = address["node"] == node and "local" in address
    at: bytes | tuple[str, int]
    if not is_local and "host" not in address:
        raise UnreachableError(None, f"it listens on its own machine ({address['node']}) alone")
    if is_local:
        family, at = socket.AF_UNIX, b"\0" + address["local"].encode()
    else:
        family, at = _family_of(address["host"]), (address["host"], address["port"])
    stream = own(lambda: socket.socket(family, socket.SOCK_STREAM))
    try:
        stream.settimeout(seconds)
        stream.connect(at)
    except OSError as error:
        stream.close()
        where = None if is_local else f"{address['host']} port {address['port']}"
        raise UnreachableError(where, str(error), is_refused=isinstance(error, ConnectionRefusedError)) from error
    return stream


def _family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _own_address(*, guess: bool = True) -> str:
    """The address under which the others reach this worker: that of GLOO_SOCKET_IFNAME, or of the way to the master.

    Args:
        guess: if the master's does not tell, take that of the host's name, or of the default route.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        own = address_of(interface)
        if own is not None:
            return own
        if sys.platform == "linux":  # elsewhere nothing is known of interfaces
            raise RuntimeError(
                f"GLOO_SOCKET_IFNAME={interface}: this network interface has no address at which others reach this worker. "
                "Name another one (`ip address` lists them)."
            )
    for target in (os.environ.get("MASTER_ADDR", ""), *((socket.gethostname(), _ELSEWHERE) if guess else ())):
        with contextlib.suppress(OSError):
            family, kind, _, _, to = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(to)  # sends nothing: looks the way up
                found = str(probe.getsockname()[0])
                # The master may call itself 'localhost', which others cannot use. Unspecified would be all interfaces.
                address = ipaddress.ip_address(found.partition("%")[0])
                if not (address.is_loopback or address.is_unspecified):
                    return found
    return _LOOPBACK


def address_of(interface: str) -> str | None:
    """The address of a network interface, of IPv4 if it has one; None if it is unknown."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            siocgifaddr = 0x8915  # of Linux
            answer = fcntl.ioctl(any_socket.fileno(), siocgifaddr, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
    except (ImportError, OSError):
        return _ipv6_address_of(interface)


def _ipv6_address_of(interface: str) -> str | None:
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope != "20":  # one of the link alone is no use without the name of an interface
                return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return None
