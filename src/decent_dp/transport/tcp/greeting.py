"""How the two ends of a new connection prove that they are workers of one run.

The worker of higher incarnation dials or, of two with the same one, that of higher rank. Three messages of fixed length pass
before the first frame:

| from | message | carries |
|---|---|---|
| acceptor | CHALLENGE | magic, version, a nonce |
| dialer | HELLO | its rank, uid and incarnation, a nonce of its own, a proof |
| acceptor | ANSWER | WELCOME, REFUSED or REPLACED, its uid and incarnation, the reason of a refusal, a proof |

A proof is an HMAC-SHA256 with the run's secret over all that identifies the two ends: the version, the run, both ranks, the
dialer's uid and incarnation, and both nonces. So a recorded message is worth nothing later, or at another worker. Each
direction has a label of its own, so that a proof cannot be sent back. Who has no valid proof gets no answer: its connection is
closed.

Frames that follow are not authenticated (docs/security.md).
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass

from decent_dp.transport.communicators import GreetingError
from decent_dp.transport.tcp.protocol import VERSION

__all__ = ["GUEST", "REPLACED", "Greeting", "GreetingError", "Identity", "ReplacedError", "greet", "is_greeted"]

_MAGIC = b"decentdp"
_NONCE = 16
_WELCOME, _REFUSED, _REPLACED = 1, 2, 3
# The reason of a refusal that is for good.
REPLACED = "another process has taken its place"
# In place of a rank: a process that is no worker yet, and wants something else than exchanges.
GUEST = 2**32 - 1
# Magic, version, nonce.
_CHALLENGE = struct.Struct(f"<8sH{_NONCE}s")
# Rank, uid, incarnation, nonce, proof.
_HELLO = struct.Struct(f"<I8sQ{_NONCE}s32s")
# Kind, uid, incarnation, and the reason of a refusal, padded with zeros; a proof follows.
_ANSWER = struct.Struct("<B8sQ192s")
_PROOF = 32
# Version, run, the ranks of dialer and acceptor, the dialer's uid and incarnation, the nonces of acceptor and dialer.
_TRANSCRIPT = struct.Struct(f"<H16sII8sQ{_NONCE}s{_NONCE}s")
# Of equal length, so that no label with what follows is another label with something else.
_FROM_DIALER, _FROM_ACCEPTOR = b"decent_dp hello ", b"decent_dp answer"


class ReplacedError(GreetingError):
    """Another process is this worker by now."""


@dataclass(frozen=True)
class Identity:
    """Who is at one end of a connection.

    Attributes:
        run_id: 16 bytes, the same on all workers of a run.
        rank: of the worker.
        uid: 8 bytes, drawn at random by each process.
        incarnation: 0 for the processes that began the run; those that join it later are counted.
    """

    run_id: bytes
    rank: int
    uid: bytes
    incarnation: int = 0

    def __post_init__(self) -> None:
        if (len(self.run_id), len(self.uid)) != (16, 8):
            raise ValueError(f"run_id and uid have {len(self.run_id)} and {len(self.uid)} bytes, and must have 16 and 8")


def _transcript(dialer: Identity, acceptor: int, nonces: tuple[bytes, bytes]) -> bytes:
    return _TRANSCRIPT.pack(VERSION, dialer.run_id, dialer.rank, acceptor, dialer.uid, dialer.incarnation, *nonces)


def _proof(secret: bytes, label: bytes, *said: bytes) -> bytes:
    return hmac.digest(secret, label + b"".join(said), "sha256")


class Greeting:
    """The acceptor's side, without a socket: ``challenge`` is sent first, ``feed`` takes what comes.

    Args:
        identity: this worker's.
        secret: known to the workers of the run alone.
    """

    def __init__(self, identity: Identity, secret: bytes) -> None:
        self._identity, self._secret = identity, secret
        self._nonce = secrets.token_bytes(_NONCE)
        self._seen = b""
        self._said = b""
        self.challenge = _CHALLENGE.pack(_MAGIC, VERSION, self._nonce)

    @property
    def missing(self) -> int:
        """Bytes of the hello that have not come. More must not be read: frames follow."""
        return _HELLO.size - len(self._seen)

    def feed(self, part: bytes) -> None:
        self._seen += part

    def verify(self) -> Identity | None:
        """Who has said hello; None if the dialer does not know the secret, or is of another run. The hello must be whole."""
        rank, uid, incarnation, nonce, proof = _HELLO.unpack(self._seen)
        dialer = Identity(self._identity.run_id, rank, uid, incarnation)
        self._said = _transcript(dialer, self._identity.rank, (self._nonce, nonce))
        return dialer if hmac.compare_digest(proof, _proof(self._secret, _FROM_DIALER, self._said)) else None

    def answer(self, refusal: str | None) -> bytes:
        """What a dialer that was verified gets: welcome (None), or the reason why it is refused."""
        kind = _WELCOME if refusal is None else _REPLACED if refusal == REPLACED else _REFUSED
        answer = _ANSWER.pack(
            kind, self._identity.uid, self._identity.incarnation, (refusal or "").encode()
        )  # cuts a long text
        return answer + _proof(self._secret, _FROM_ACCEPTOR, self._said, answer)


def greet(stream: socket.socket, identity: Identity, secret: bytes, peer: int, timeout: float) -> Identity:
    """The dialer's side, blocking. Returns the identity of the peer.

    Args:
        stream: connected to ``peer``. It is left with a timeout.
        identity: this worker's.
        secret: known to the workers of the run alone.
        peer: the rank that is to be reached.
        timeout: seconds for all of it.

    Raises:
        GreetingError: the peer refused, did not prove that it is that worker, or closed the connection.
        TimeoutError: the peer has not answered in time.
    """
    deadline = time.monotonic() + timeout
    magic, version, theirs = _CHALLENGE.unpack(_receive(stream, _CHALLENGE.size, peer, deadline))
    if magic != _MAGIC:
        raise GreetingError(
            f"another program than worker {peer} answers at its address. It has ended, or GLOO_SOCKET_IFNAME on it names the "
            "wrong network interface."
        )
    if version != VERSION:
        raise GreetingError(
            f"worker {peer} speaks version {version} of the protocol, and worker {identity.rank} version {VERSION}. Start all "
            "workers from one installation."
        )
    nonce = secrets.token_bytes(_NONCE)
    said = _transcript(identity, peer, (theirs, nonce))
    proof = _proof(secret, _FROM_DIALER, said)
    try:
        stream.sendall(_HELLO.pack(identity.rank, identity.uid, identity.incarnation, nonce, proof))
    except ConnectionError as error:
        raise _closed(peer) from error
    whole = _receive(stream, _ANSWER.size + _PROOF, peer, deadline)
    answer, proof = whole[: _ANSWER.size], whole[_ANSWER.size :]
    if not hmac.compare_digest(proof, _proof(secret, _FROM_ACCEPTOR, said, answer)):
        raise GreetingError(
            f"who answers at the address of worker {peer} does not know the secret of this run. If no other run uses that "
            "address, somebody may have come between: see that only the machines of this run reach its ports."
        )
    kind, uid, incarnation, text = _ANSWER.unpack(answer)
    if kind != _WELCOME:
        reason = text.rstrip(b"\0").decode(errors="replace")
        raise (ReplacedError if kind == _REPLACED else GreetingError)(
            f"worker {peer} refused the connection of worker {identity.rank}: {reason}."
        )
    return Identity(identity.run_id, peer, uid, incarnation)


def is_greeted(stream: socket.socket, timeout: float) -> bool:
    """Whether a worker, of any run, is at the other end of a new connection. Nothing is said to it.

    Raises:
        TimeoutError: nobody has said anything in time. The process is stopped, or has ended and left the socket to a child.
        OSError: the connection broke.
    """
    stream.settimeout(timeout)
    return stream.recv(len(_MAGIC)) == _MAGIC


def _receive(stream: socket.socket, count: int, peer: int, deadline: float) -> bytes:
    """Exactly ``count`` bytes."""
    seen = b""
    while len(seen) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"worker {peer} has not answered the greeting in time")
        stream.settimeout(left)
        try:
            part = stream.recv(count - len(seen))
        except TimeoutError:
            continue
        except ConnectionError as error:
            raise _closed(peer) from error
        if not part:
            raise _closed(peer)
        seen += part
    return seen


def _closed(peer: int) -> GreetingError:
    return GreetingError(
        f"worker {peer} closed the connection instead of greeting. It has ended, or takes this worker for one of another run: "
        "start all workers together."
    )
