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
from decent_dp.transport.hello import BULK
from decent_dp.transport.messages import ANSWERS, STATE, Header, Key, pack
from decent_dp.transport.peer_link import Channel, LinkState, PeerLink
from decent_dp.transport.peer_links import PeerLinks
from decent_dp.transport.waiter import Repeats, start_thread

__all__ = ["Requests"]

_log = logging.getLogger(__name__)

# Requests that wait to be served. A joiner has a few at a time; more are dropped, and asked again.
_MOST_WAITING = 256

Answer: TypeAlias = Callable[[int, int, bytes], bytes]


class Requests:
    """Each link keeps the requests that its peer has not answered: they are sent again on its next connection.

    Args:
        want: makes sure that there will be a connection to a worker; for the transport's thread.
    """

    def __init__(self, links: PeerLinks, commands: Commands, want: Callable[[int], None]) -> None:
        self._links, self._commands, self._want = links, commands, want
        self._answer: Answer | None = None
        self._waiting: queue.Queue[tuple[PeerLink, Channel, Key, bytes] | None] = queue.Queue(_MOST_WAITING)
        self._errors = Repeats()
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
                answer.set_exception(ConnectionError(f"worker {peer} cannot be asked: {link.why_lost}"))
                return
            self._number += 1
            link.questions[self._number] = request, answer
            if link.channels:
                link.channels[BULK].send(pack(STATE, (self._number, 0, 0)), request)
            else:
                self._want(peer)

        self._commands.call(ask)
        return answer

    # -- in the transport's thread --------------------------------------------------------------------------------------

    def hear(self, link: PeerLink, channel: Channel, header: Header, body: bytes) -> None:
        """A STATE has come."""
        if header.flags & ANSWERS:
            _, answer = link.questions.pop(header.key[0], (b"", None))
            with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
                if answer is not None:
                    answer.set_result(body)
        elif self.is_served:
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait((link, channel, header.key, body))

    def close(self) -> None:
        """Nothing is answered any more."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
        self._waiting.put_nowait(None)

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
