"""How the two ends of a new connection prove that they are workers of one run.

Either of two workers may dial. Four messages pass on each connection before anything else:

| step | from | carries |
|---|---|---|
| 1 | the dialling worker | its rank, uid and incarnation, whom it dials, the plane, an id of this attempt, a nonce |
| 2 | the listening worker | a nonce of its own |
| 3 | the dialling worker | a proof |
| 4 | the listening worker | its uid and incarnation, the reason of a refusal (empty: the other worker is welcome), a proof |

A proof is an HMAC-SHA256 with the run's secret over all that identifies the two ends: the version, the run, what step 1 said,
both nonces, and the keys with which the connection is encrypted. So a recorded message is worth nothing later, or at another
worker, and nobody can come between with keys of their own. Each direction has a label of its own, so that a proof cannot be
sent back. Who has no valid proof gets no answer.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from decent_dp.transport.messages import BULK, VERSION
from decent_dp.transport.peer_errors import GreetingError
from decent_dp.transport.sockets import Curve

__all__ = [
    "CROSSING",
    "REPLACED",
    "Credentials",
    "Dialled",
    "Identity",
    "RefusedError",
    "Visitor",
    "password",
]

# The reason of a refusal that is for good.
REPLACED = "another process has taken its place"
# That of one after which the listening worker's own connection will be used.
CROSSING = "it dials, too"

# The beginning of steps 1 and 2: tells other programs from workers.
_MAGIC = b"decentdp"
# Bytes that are drawn anew for each connection, so that no proof is worth anything later.
_NONCE = 16
# Magic, version; step 1: rank, uid, incarnation, whom, plane, attempt, nonce.
_HELLO = struct.Struct(f"<8sHI8sQIB{_NONCE}s{_NONCE}s")
# Magic, version, nonce.
_CHALLENGE = struct.Struct(f"<8sH{_NONCE}s")
# Uid, incarnation, and the reason of a refusal, padded with zeros; a proof follows.
_ANSWER = struct.Struct("<8sQ192s")
# The labels of proofs are of equal length, so that none with what follows is another one with something else. Of step 3:
_FROM_DIALLER = b"decent_dp hello "
# of step 4, so that a proof cannot be sent back;
_FROM_LISTENER = b"decent_dp answer"
# and of the password, which others may see.
_PASSWORD = b"decent_dp plain "


class RefusedError(GreetingError):
    """The other worker has refused the connection. ``reason``: why."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


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


@dataclass(frozen=True)
class Credentials:
    """With what this worker proves who it is, and tells others of its run from strangers.

    Attributes:
        identity: this worker's.
        secret: with which workers prove that they are of this run.
        curve: this worker's keys.
        known: the public keys of workers, as far as they are known.
        is_known: whether the store has a public key; blocking, and raises OSError or RuntimeError.
    """

    identity: Identity
    secret: bytes = field(repr=False)
    curve: Curve
    known: set[bytes]
    is_known: Callable[[bytes], bool]


def _prove(secret: bytes, label: bytes, *said: bytes) -> bytes:
    return hmac.digest(secret, label + b"".join(said), "sha256")


def password(secret: bytes) -> bytes:
    """Of connections over the network that are not encrypted: who has seen it there still has no proof."""
    return _prove(secret, _PASSWORD).hex().encode()


class Dialled:
    """The dialling worker's end of one connection.

    Args:
        identity: of this worker.
        whom: the rank that is dialled.
        keys: the public keys of this worker and of the other one, of 32 bytes each; empty without encryption.

    Attributes:
        welcome: the identity of the other worker, once it has accepted; None before.
    """

    def __init__(self, identity: Identity, secret: bytes, whom: int, plane: int, attempt: bytes, keys: bytes) -> None:
        self._identity, self._secret, self._whom, self._keys = identity, secret, whom, keys
        nonce = secrets.token_bytes(_NONCE)
        me = identity
        self.hello = _HELLO.pack(_MAGIC, VERSION, me.rank, me.uid, me.incarnation, whom, plane, attempt, nonce)
        self._said = b""
        self.welcome: Identity | None = None

    @property
    def challenged(self) -> bool:
        """Whether the other worker has answered step 1, so this port of it can be reached."""
        return bool(self._said)

    def prove(self, challenge: bytes) -> bytes:
        """Step 3, for a body of step 2.

        Raises:
            GreetingError: something else answers. (The header of a message tells another version.)
        """
        if len(challenge) != _CHALLENGE.size or not challenge.startswith(_MAGIC):
            raise GreetingError(f"another program than worker {self._whom} answers at its address")
        *_, nonce = _CHALLENGE.unpack(challenge)
        self._said = self._identity.run_id + self.hello + nonce + self._keys
        return _prove(self._secret, _FROM_DIALLER, self._said)

    def accept(self, answer: bytes) -> Identity:
        """Sets ``welcome`` from a body of step 4, and returns it.

        Raises:
            GreetingError: it refuses, or does not know the secret.
        """
        said, proof = answer[: _ANSWER.size], answer[_ANSWER.size :]
        if (
            len(said) != _ANSWER.size
            or not self._said
            or not hmac.compare_digest(proof, _prove(self._secret, _FROM_LISTENER, self._said, said))
        ):
            raise GreetingError(
                f"who answers at the address of worker {self._whom} does not know the secret of this run. If no other run uses "
                "that address, somebody may have come between: see that only the machines of this run reach its ports."
            )
        uid, incarnation, text = _ANSWER.unpack(said)
        if reason := text.rstrip(b"\0").decode(errors="replace"):
            text = f"worker {self._whom} refused the connection of worker {self._identity.rank}: {reason}."
            raise RefusedError(text, reason)
        self.welcome = Identity(self._identity.run_id, self._whom, uid, incarnation)
        return self.welcome


class Visitor:
    """The listening worker's end of one connection, before it is proven.

    Args:
        identity: of this worker.
        hello: the body of step 1.
        keys: the public keys of the other worker, as the connection has it, and of this one; empty without encryption.

    Attributes:
        challenge: the body of step 2.
        worker: who says that it is there; proven after ``verify``.

    Raises:
        ValueError: it is no hello of a worker of this version.
    """

    def __init__(self, identity: Identity, secret: bytes, hello: bytes, keys: bytes) -> None:
        self._identity, self._secret = identity, secret
        nonce = secrets.token_bytes(_NONCE)
        self.challenge = _CHALLENGE.pack(_MAGIC, VERSION, nonce)
        if len(hello) != _HELLO.size:
            raise ValueError("no hello")
        magic, version, rank, uid, incarnation, whom, self.plane, self.attempt, _ = _HELLO.unpack(hello)
        if magic != _MAGIC or (whom != identity.rank and version == VERSION) or self.plane > BULK:
            raise ValueError("no hello")
        self.worker = Identity(identity.run_id, rank, uid, incarnation)
        self._said = identity.run_id + hello + nonce + keys

    def verify(self, proof: bytes) -> bool:
        return hmac.compare_digest(proof, _prove(self._secret, _FROM_DIALLER, self._said))

    def answer(self, refusal: str = "") -> bytes:
        """Step 4: the reason why the worker is refused; empty: it is welcome."""
        answer = _ANSWER.pack(self._identity.uid, self._identity.incarnation, refusal.encode())  # cuts a long text
        return answer + _prove(self._secret, _FROM_LISTENER, self._said, answer)
