"""Requests to another worker and their answers, over the links: a state in chunks, and a seat for a process that joins."""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import TypeAlias

from decent_dp.transport.commands import Commands
from decent_dp.transport.messages import ANSWERS, BULK, STATE, Header, Key, pack
from decent_dp.transport.peer_links import LinkState, PeerLink, PeerLinks
from decent_dp.transport.sockets import Channel
from decent_dp.transport.waiter import Repeats, start_thread

__all__ = ["Requests"]

_log = logging.getLogger(__name__)

# Requests that wait to be served. A joiner has a few at a time; more are dropped, and asked again.
_MOST_WAITING = 256

Answer: TypeAlias = Callable[[int, int, bytes], bytes]


class Requests:
    """Those that are not answered are sent again on the next connection of their link."""

    def __init__(self, links: PeerLinks, commands: Commands) -> None:
        self._links, self._commands = links, commands
        self._answer: Answer | None = None
        self._waiting: queue.Queue[tuple[PeerLink, Channel, Key, bytes] | None] = queue.Queue(_MOST_WAITING)
        self._errors = Repeats()
        # By number: whom this worker has asked what, and the answer to come.
        self._asked: dict[int, tuple[PeerLink, bytes, Future[bytes]]] = {}
        self._number = 0

    # -- called by any thread -----------------------------------------------------------------------------------------

    @property
    def is_served(self) -> bool:
        return self._answer is not None

    def serve(self, answer: Answer) -> None:
        """``Neighbours.serve``."""
        is_first, self._answer = self._answer is None, answer
        if is_first:
            start_thread(self._serve, "decent_dp-joiners", self._commands.fail)

    def ask(self, peer: int, incarnation: int, request: bytes) -> Future[bytes]:
        """``Neighbours.ask``."""
        answer: Future[bytes] = Future()

        def ask() -> None:
            link = self._links.to(peer)
            if link.incarnation != incarnation or link.state is LinkState.GONE:
                answer.set_exception(_cannot_be_asked(link))
                return
            self._number += 1
            self._asked[self._number] = link, request, answer
            if link.channels:
                self._send(self._number)
            else:
                self._links.needed.add(peer)

        self._commands.call(ask)
        return answer

    # -- in the transport's thread --------------------------------------------------------------------------------------

    def hear(self, link: PeerLink, channel: Channel, header: Header, body: bytes) -> None:
        """A STATE has come."""
        if header.flags & ANSWERS:
            of, _, answer = self._asked.get(header.key[0], (None, b"", None))
            if of is link and answer is not None:
                del self._asked[header.key[0]]
                with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
                    answer.set_result(body)
        elif self.is_served:
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait((link, channel, header.key, body))

    def ask_again(self, link: PeerLink) -> None:
        """Sends what is not answered over a new connection."""
        for number, (of, _, answer) in self._asked.items():
            if of is link and not answer.done():
                self._send(number)

    def fail(self, link: PeerLink) -> None:
        """The peer cannot be asked any more, or at all."""
        for number in [number for number, (of, *_) in self._asked.items() if of is link]:
            *_, answer = self._asked.pop(number)
            if not answer.done():
                answer.set_exception(_cannot_be_asked(link))

    def close(self) -> None:
        """Nothing is answered any more."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
        self._waiting.put_nowait(None)

    def _send(self, number: int) -> None:
        link, request, _ = self._asked[number]
        link.channels[BULK].send(pack(STATE, (number, 0, 0)), request)

    # -- in the thread that answers -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        assert self._answer is not None
        while (request := self._waiting.get()) is not None:
            link, channel, key, body = request
            answer = b""
            try:
                answer = self._answer(link.peer, link.incarnation, body)
            except Exception as error:  # the process asks another worker, and this one trains on
                if self._errors.again():
                    _log.warning("a request was not answered (%d times by now)", self._errors.times, exc_info=error)
            with contextlib.suppress(RuntimeError):  # the transport was closed
                self._commands.call(partial(channel.send, pack(STATE, key, ANSWERS), answer))
            del link, channel, body, request, answer  # not kept until the next one comes


def _cannot_be_asked(link: PeerLink) -> ConnectionError:
    return ConnectionError(f"worker {link.peer} cannot be asked: {link.why_lost}")
