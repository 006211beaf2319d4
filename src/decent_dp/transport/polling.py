"""The sockets that the transport's thread polls, and the connection that each belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import zmq

from decent_dp.transport.peer_link import Channel
from decent_dp.transport.sockets import Socket, Sockets

__all__ = ["Polling"]


class Polling:
    """Used by the transport's thread alone.

    Attributes:
        sources: by zmq's sockets, those with a monitor: the socket.
        owners: by dialled socket: its connection, once it is open.
        routes, accepted: connections that others have made, by listener and routing id, and by listener and descriptor.
        over: connections that have ended.
        leaving: those that stay open for a while though their link is over, and until when.
    """

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._poller = zmq.Poller()
        self.sources: dict[Any, Socket] = {}
        self.owners: dict[Socket, Channel] = {}
        self.routes: dict[tuple[Socket, bytes], Channel] = {}
        self.accepted: dict[tuple[Socket, int], Channel] = {}
        self.over: list[Channel] = []
        self.leaving: dict[Channel, float] = {}

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

    def watch(self, socket: Socket) -> None:
        for stream in (socket.zmq, socket.monitor):
            self.sources[stream] = socket
            self.add(stream)

    def pause(self, socket: Socket) -> None:
        self._poller.unregister(socket.zmq)

    def resume(self, channel: Channel) -> None:
        """A dialled connection is open."""
        if channel.socket.zmq in self.sources:
            self.owners[channel.socket] = channel
            self.add(channel.socket.zmq)

    def forget(self, socket: Socket) -> None:
        if socket.zmq in self.sources:
            self.owners.pop(socket, None)
            for stream in (socket.zmq, socket.monitor):
                del self.sources[stream]
                if stream in self._poller:
                    self._poller.unregister(stream)
            self._sockets.close(socket)

    def hang_up(self, channel: Channel) -> None:
        if not channel.routing_id:
            self.forget(channel.socket)
        elif self.routes.get(channel.route) is channel:
            del self.routes[channel.route]
            if self.accepted.get(channel.accepted) is channel:
                del self.accepted[channel.accepted]
                channel.socket.hang_up(channel.descriptor)
