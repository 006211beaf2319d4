"""The sockets that the transport's thread polls, the connection that each belongs to, and who takes what comes over it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from decent_dp.errors import WireError
from decent_dp.transport.channels import Channel, Link
from decent_dp.transport.dialling import Dialler, End
from decent_dp.transport.flow import Flow
from decent_dp.transport.link import LinkState
from decent_dp.transport.listening import Doorman
from decent_dp.transport.messages import BYE, DATA, STATE, Header, unpack
from decent_dp.transport.sockets import Socket, Sockets

__all__ = ["Polling", "Reader"]


class Polling:
    """Used by the transport's thread alone.

    Attributes:
        sources: by zmq's sockets, those with a monitor: the socket.
        owners: by dialled socket: its connection, or the end of an attempt.
        routes, accepted: connections that others have made, by listener and routing id, and by listener and descriptor.
        over: connections that have ended.
        dialler, doorman: handle the events of connections that are not open yet; set before anything is watched.
    """

    dialler: Dialler
    doorman: Doorman

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._poller = zmq.Poller()
        self.sources: dict[Any, Socket] = {}
        self.owners: dict[Socket, End | Channel] = {}
        self.routes: dict[tuple[Socket, bytes], Channel] = {}
        self.accepted: dict[tuple[Socket, int], Channel] = {}
        self.over: list[Channel] = []

    def add(self, source: Any) -> None:
        """Polls a descriptor, or a socket without a monitor."""
        self._poller.register(source, zmq.POLLIN)

    def wait(self, milliseconds: int) -> list[Any]:
        return [source for source, _ in self._poller.poll(milliseconds)]

    def is_watched(self, socket: Socket) -> bool:
        return socket.zmq in self._poller

    def accept(self, channels: Iterable[Channel]) -> None:
        """Connections that another worker has made are open."""
        for channel in channels:
            self.routes[channel.route] = self.accepted[channel.accepted] = channel

    def watch(self, socket: Socket, owner: End | None = None) -> None:
        self.sources[socket.zmq] = self.sources[socket.monitor] = socket
        if owner is not None:
            self.owners[socket] = owner
        self._poller.register(socket.zmq, zmq.POLLIN)
        self._poller.register(socket.monitor, zmq.POLLIN)

    def pause(self, socket: Socket) -> None:
        self._poller.unregister(socket.zmq)

    def resume(self, socket: Socket, channel: Channel) -> None:
        if socket in self.owners:
            self.owners[socket] = channel
            self._poller.register(socket.zmq, zmq.POLLIN)

    def forget(self, socket: Socket) -> None:
        if socket in self.owners:
            del self.owners[socket], self.sources[socket.zmq], self.sources[socket.monitor]
            for stream in (socket.zmq, socket.monitor):
                if stream in self._poller:
                    self._poller.unregister(stream)
            self._sockets.close(socket)

    def read_events(self, socket: Socket) -> None:
        owner = self.owners.get(socket)
        for event in socket.events():
            if socket.is_router and event.kind == zmq.EVENT_DISCONNECTED and (socket, event.descriptor) in self.accepted:
                channel = self.accepted.pop((socket, event.descriptor))
                if socket.is_open_to_others:  # somebody who has seen its routing id may use it from now on
                    self.routes.pop(channel.route, None)
                self.over.append(channel)
            elif socket.is_router:
                self.doorman.on_event(socket, event)
            elif isinstance(owner, End):
                self.dialler.on_event(owner, event)
            elif event.is_end and owner is not None:
                self.over.append(owner)

    def hang_up(self, channel: Channel) -> None:
        if not channel.routing_id:
            self.forget(channel.socket)
        elif self.routes.get(channel.route) is channel:
            del self.routes[channel.route]
            if self.accepted.get(channel.accepted) is channel:
                del self.accepted[channel.accepted]
                channel.socket.hang_up(channel.descriptor)


class Reader:
    """Reads messages and dispatches them. Used by the transport's thread alone.

    Args:
        on_bye, on_state: called with the link, the connection and the header of a BYE; of a STATE, and its body.
    """

    def __init__(
        self,
        polling: Polling,
        flow: Flow,
        on_bye: Callable[[Link, Channel, Header], None],
        on_state: Callable[[Link, Channel, Header, bytes], None],
    ) -> None:
        self._polling, self._flow, self._on_bye, self._on_state = polling, flow, on_bye, on_state

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
            _rest(stream)
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
                elif header.kind == STATE:
                    self._on_state(link, channel, header, body)
                elif self._is_member(link):
                    self._flow.hear(link, header, body)
        except WireError as error:
            _rest(stream)
            self._flow.fail(link, error)

    def _is_member(self, link: Link) -> bool:
        """Whether the peer may send more than STATE. To a process that joins it does so from when on it is a member there."""
        if link.joining is not None and self._flow.links.get(link.peer) is link:
            self._flow.open(link, link.uid, *link.joining)
        return link.state is LinkState.OPEN

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
