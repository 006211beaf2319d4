"""The addresses at which workers listen, and how peers look them up."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import os
import secrets
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any

from decent_dp.transport.dialling import Target
from decent_dp.transport.peer_errors import UnreachableError
from decent_dp.transport.rendezvous import Rendezvous, named_interface
from decent_dp.transport.sockets import Curve, Socket, Sockets

__all__ = ["address_of", "find", "listen", "probe"]

# An address that nobody has (RFC 5737): the way to it is the default route.
_ELSEWHERE = "192.0.2.1"
_LOOPBACK = "127.0.0.1"
# An environment variable: the ports at which a worker may listen.
_PORTS = "DECENT_DP_PORTS"
# What the name of a local socket for bulk data ends with.
_BULK = "-bulk"


def listen(rendezvous: Rendezvous, sockets: Sockets) -> list[Socket]:
    """Listens for other workers, with a socket for each plane, and stores the addresses.

    On Linux, workers on this one's network stack use local sockets. If all workers are there, nothing listens beyond the
    loopback interface, but where others may come and the master's address is another. What leaves the node is encrypted.

    Raises:
        RuntimeError: the address or the ports cannot be used.
        ValueError: DECENT_DP_PORTS is no range of ports.
    """
    listeners: list[Socket] = []
    address: dict[str, Any] = {"node": rendezvous.node, "incarnation": rendezvous.incarnation, "pid": os.getpid()}
    address["machine"] = socket.gethostname()
    run, others = rendezvous.run, rendezvous.run.world_size - 1
    if rendezvous.local and sys.platform == "linux":
        address["local"] = f"decent_dp-{secrets.token_hex(8)}"
        listeners += [sockets.listen(_local(address)), sockets.listen(_local(address) + _BULK, beats=False)]
    is_far, grows = len(rendezvous.local) < others, run.places > run.world_size
    if is_far or grows or not listeners:
        host = _own_address(guess=is_far) if is_far or grows else _LOOPBACK
        encrypts = run.encrypt if run.encrypt is not None else is_far or grows
        remote = _listen_at(host, sockets, rendezvous.curve if encrypts else None)
        address["host"] = host
        address["port"], address["bulk"] = (int(listener.endpoint.rpartition(":")[2]) for listener in remote)
        address["key"] = rendezvous.curve.public.hex() if encrypts else ""
        listeners += remote
    rendezvous.publish(address)
    return listeners


def _listen_at(host: str, sockets: Sockets, curve: Curve | None) -> list[Socket]:
    """A socket for control and one for bulk data, at any ports or at those of DECENT_DP_PORTS."""
    text = os.environ.get(_PORTS, "").strip()
    ports = iter(_ports(text)) if text else iter(["*", "*"])
    made: list[Socket] = []
    for port in ports:
        try:
            made.append(sockets.listen(f"tcp://{_bracketed(host)}:{port}", curve, beats=not made))
        except OSError as error:
            if not (text and error.errno == errno.EADDRINUSE):
                raise RuntimeError(f"this worker cannot listen at {host}: {error}") from error
        if len(made) == 2:
            return made
    raise RuntimeError(
        f"{_PORTS}={text}: fewer than two of these ports are free at {host}, and each worker of a machine needs two. Give a "
        "wider range, or end what uses them (`ss -ltnp` shows it)."
    )


def _ports(text: str) -> range:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) < int(last) < 2**16):
        raise ValueError(f"{_PORTS}={text} must be a range of ports, such as 29600-29699")
    return range(int(first), int(last) + 1)


def find(rendezvous: Rendezvous, peer: int, seconds: float, incarnation: int = 0, answers: float = math.inf) -> Target:
    """Returns where the process ``peer`` of this incarnation listens, after checking that the port is open.

    Args:
        seconds: the timeout of the lookup. ``answers``: that of the check, if it is shorter.

    Raises:
        UnreachableError: nobody answers at the address of the peer.
        OSError: this process has no file descriptor left, or the store does not answer.
        RuntimeError: as of ``Rendezvous.address_of``.
    """
    address = rendezvous.address_of(peer, incarnation, seconds)
    probe(address, rendezvous.node, min(seconds, answers), _where(rendezvous.addresses.get(rendezvous.rank, {}))).close()
    if _is_local(address, rendezvous.node):
        return Target(_local(address), _local(address) + _BULK)
    control, bulk = (f"tcp://{_bracketed(address['host'])}:{address[plane]}" for plane in ("port", "bulk"))
    return Target(control, bulk, bytes.fromhex(address.get("key", "")), _where(address))


def probe(address: Mapping[str, Any], node: str, seconds: float, own: str = "") -> socket.socket:
    """A plain connection to the process that has stored this address: ZeroMQ does not tell that nobody listens.

    Args:
        node: of this process. ``own``: where it listens itself, for the error.

    Raises:
        UnreachableError: nobody answers there.
        OSError: this process has no file descriptor left.
    """
    is_local = _is_local(address, node)
    at: bytes | tuple[str, int]
    if not is_local and "host" not in address:
        raise UnreachableError(None, f"it listens on its own machine ({address['node']}) alone")
    if is_local:
        family, at = socket.AF_UNIX, b"\0" + address["local"].encode()
    else:
        family = socket.AF_INET6 if ":" in address["host"] else socket.AF_INET
        at = (address["host"], address["port"])
    stream = socket.socket(family, socket.SOCK_STREAM)
    try:
        stream.settimeout(seconds)
        stream.connect(at)
    except OSError as error:
        stream.close()
        where = None if is_local else _where(address)
        raise UnreachableError(where, str(error), own, is_refused=isinstance(error, ConnectionRefusedError)) from error
    return stream


def _is_local(address: Mapping[str, Any], node: str) -> bool:
    return address["node"] == node and "local" in address


def _where(address: Mapping[str, Any]) -> str:
    return f"{address['host']} port {address['port']}" if "host" in address else ""


def _local(address: Mapping[str, Any]) -> str:
    return f"ipc://@{address['local']}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _own_address(*, guess: bool = True) -> str:
    """The address under which the others reach this worker: that of the interface that is named, or of the way to the master.

    Args:
        guess: if the master's does not tell, take that of the host's name, or of the default route.
    """
    name, interface = named_interface()
    if interface:
        own = address_of(interface)
        if own is not None:
            return own
        if sys.platform == "linux":  # elsewhere nothing is known of interfaces
            raise RuntimeError(
                f"{name}={interface}: this network interface has no address at which others reach this worker. Name another "
                "one (`ip address` lists them)."
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
