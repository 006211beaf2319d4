"""This worker's connections, as its other threads use them."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.util import Finalize

from decent_dp.transport.agreement import PeerView
from decent_dp.transport.commands import Clock, Commands
from decent_dp.transport.connections import Connections
from decent_dp.transport.control_plane import ControlPlane
from decent_dp.transport.dialling import Dialler, Target
from decent_dp.transport.hello import Credentials
from decent_dp.transport.messages import BLOCK, BLOCKS, BULK, CALL, CONTROL, Key, pack
from decent_dp.transport.peer_links import LinkState, PeerLinks
from decent_dp.transport.requests import Requests
from decent_dp.transport.router import Router
from decent_dp.transport.sockets import Socket, Sockets

__all__ = ["Wire"]

# Seconds between two looks whether there is a connection.
_LOOK = 0.001


class Wire:
    """This worker's connections. Any thread may call its methods; they leave changes to the transport's thread.

    Args:
        expected: the ranks of the run.
        local: the workers that share this one's network stack.
        sockets: makes them.
        listeners: those to which others connect.
        find: where a process of a worker listens, by its rank and incarnation; blocking.
        timeout: seconds that a worker has to answer when it is dialled.
    """

    def __init__(
        self,
        credentials: Credentials,
        expected: range,
        local: frozenset[int],
        sockets: Sockets,
        listeners: list[Socket],
        find: Callable[[int, int], Target],
        timeout: float,
    ) -> None:
        mine, self._asked = credentials.identity, set[int]()
        self.clock, self.commands = Clock(sockets.dead_after), Commands()
        self.links = PeerLinks(local, expected, sockets.dead_after, self.clock)
        self.call, self.view, self.want = self.commands.call, self.links.view, self.links.needed.add
        self.control_plane = ControlPlane(mine.rank, len(expected), self, mine.incarnation)
        self.requests = Requests(self.links, self.commands)
        self.connections = Connections(mine.rank, self.links, sockets, self.control_plane, self.requests)
        self.flow, self.hints, self.settlement = self.connections.flow, self.connections.hints, self.connections.settlement
        dialler = Dialler(credentials, sockets, self.commands, self.connections, find, timeout)
        self.router = Router(credentials, sockets, self.commands, self.connections, dialler, listeners)
        _WIRES.add(self)
        # A process may end right after its last exchange, without a close: what libzmq has of it still goes out.
        self._at_exit = Finalize(None, _close_at_exit, args=(weakref.ref(self),), exitpriority=10)
        self.commands.thread.start()

    def connect(self, peer: int) -> None:
        """Makes sure that there will be a connection: one of both makes it."""

        def need() -> None:
            if self.links.to(peer).state is LinkState.NEW:
                self.links.needed.add(peer)

        if peer not in self._asked:
            self._asked.add(peer)
            self.call(need)

    def is_connected(self, peer: int) -> bool:
        """Whether there is a connection. Waits until it is made, or the peer counts as dead."""
        while (view := self.view(peer)) in (PeerView.UNKNOWN, PeerView.PENDING):
            self.commands.refuse_failed()
            time.sleep(_LOOK)
        return view is PeerView.LINKED

    def why_lost(self, peer: int) -> BaseException:
        """Why a worker takes no part in an exchange."""
        link = self.links.known(peer)
        if link.state in (LinkState.NEW, LinkState.OPEN):  # where they are connected it has waited for too long itself
            return link.why or TimeoutError()
        return link.why_lost

    def renew(self, peer: int, incarnation: int, start: int = -1) -> None:
        """``Neighbours.renew``."""
        self.call(partial(self.connections.renew, peer, incarnation, start))

    def close(self, *, says_bye: bool = True) -> None:
        """Ends the thread once everything that was sent has arrived, or cannot any more.

        Args:
            says_bye: this worker has done what it was to do. Else it has failed, and counts as dead.
        """
        self._at_exit.cancel()
        self.router.close(says_bye=says_bye)

    # -- for the control plane, in the transport's thread ----------------------------------------------------------------

    def first_round(self, peer: int) -> int:
        return self.links.known(peer).start

    def send_note(self, peer: int, key: Key, text: bytes) -> None:
        link, is_block = self.links.to(peer), key[1] == BLOCKS
        if link.state is LinkState.OPEN:
            link.channels[BULK if is_block else CONTROL].send(pack(BLOCK if is_block else CALL, key), text)


_WIRES: weakref.WeakSet[Wire] = weakref.WeakSet()


def _close_at_exit(wire: weakref.ref[Wire]) -> None:
    if (found := wire()) is not None:
        found.close(says_bye=False)


def _end_in_child() -> None:
    for wire in list(_WIRES):
        wire.commands.end_in_child()


# DataLoader workers are forked where that is the default.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_in_child)
