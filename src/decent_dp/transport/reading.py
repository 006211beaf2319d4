"""Reads messages from sockets and dispatches them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import zmq

from decent_dp.errors import WireError
from decent_dp.transport.channels import Channel, Link
from decent_dp.transport.dialling import End
from decent_dp.transport.flow import Flow
from decent_dp.transport.hello import GUEST
from decent_dp.transport.link import LinkState
from decent_dp.transport.messages import BYE, DATA, STATE, Header, unpack
from decent_dp.transport.polling import Polling
from decent_dp.transport.sockets import Socket

__all__ = ["Reader"]


class Reader:
    """Used by the transport's thread alone.

    Args:
        on_bye: called with the link, the connection and the header of a BYE.
    """

    def __init__(self, polling: Polling, flow: Flow, on_bye: Callable[[Link, Channel, Header], None]) -> None:
        self._polling, self._flow, self._on_bye = polling, flow, on_bye

    def read(self, socket: Socket, until: float) -> None:
        """Reads what has come to a socket."""
        stream = socket.zmq
        with contextlib.suppress(zmq.Again):
            while self._polling.is_watched(socket) and time.monotonic() < until:
                first = stream.recv(zmq.NOBLOCK)
                owner = self._polling.routes.get((socket, first)) if socket.is_router else self._polling.owners.get(socket)
                if isinstance(owner, Channel):
                    self._take(owner, stream.recv(zmq.NOBLOCK) if socket.is_router else first)
                elif owner is not None:
                    self._take_hello(owner, first)
                elif socket.is_router:
                    self._polling.doorman.hear(socket, first)

    def _take_hello(self, end: End, header: bytes) -> None:
        body = _rest(end.channel.socket.zmq)
        try:
            self._polling.dialler.on_message(end, unpack(header, end.attempt.peer), body)
        except WireError as error:
            self._polling.dialler.fail(end, error)

    def _take(self, channel: Channel, raw: bytes) -> None:
        stream, link = channel.socket.zmq, channel.link
        if link is None:
            body, guest = _rest(stream), self._polling.streams.get(channel)
            try:
                header = unpack(raw, GUEST)
            except WireError:
                guest = None
            if guest is not None and header.kind == STATE:
                guest.hear(header, body)
            else:
                self._polling.doorman.dropped += 1
            return
        try:
            header = unpack(raw, link.peer)
            link.heard = time.monotonic()
            if header.kind == DATA:
                self._take_data(link, header, stream)
            else:
                body = _rest(stream)
                if header.kind == BYE:
                    self._on_bye(link, channel, header)
                elif link.state is LinkState.OPEN:
                    self._flow.hear(link, header, body)
        except WireError as error:
            _rest(stream)
            self._flow.fail(link, error)

    def _take_data(self, link: Link, header: Header, stream: Any) -> None:
        memory = self._flow.memory_for(link, header)
        if memory is None:
            _rest(stream)
            return
        count = stream.recv_into(memory, flags=zmq.NOBLOCK) if stream.get(zmq.RCVMORE) else 0
        if count != len(memory) or stream.get(zmq.RCVMORE):
            raise WireError(f"worker {link.peer} sent a part of {count} bytes, where it announced {len(memory)}")
        self._flow.arrived(link, header)


def _rest(stream: Any) -> bytes:
    """The second frame of a message; what follows it is dropped."""
    body = b""
    if stream.get(zmq.RCVMORE):
        body = stream.recv(zmq.NOBLOCK)
    while stream.get(zmq.RCVMORE):
        stream.recv(zmq.NOBLOCK)
    return body
