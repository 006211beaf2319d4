"""The protocol between two workers: messages of ZeroMQ over two connections, control and bulk, that are each used both ways.

A message is a header of fixed length (``pack``) and, for some kinds, a body in a frame of its own. Any of them may be repeated.

| kind | over | who sends it when | a repetition |
|---|---|---|---|
| HELLO | both | the dialling worker first, then both in turn: who they are (``hello``) | is refused |
| REFUSED | both | the listening worker: why there will be no connection | changes nothing |
| BEAT | control | both, regularly and when asked: rounds begun, epoch, paused, moving | replaces the one before |
| START | control | a receiver: what it has of a message, and how far it wants it; a sender: a hint, or an offer | replaces it |
| DATA | bulk | the sender of a message that is wanted: a part; inside a node over control if a frame can hold it | is dropped |
| VOTE | control | both, about an exchange: GOT, DROP, or ASK for the other's (``votes``) | changes nothing |
| CALL | control | both: a few bytes of an agreement or of a collective, for its key | is dropped there |
| BLOCK | bulk | both: bytes of a collective | is dropped there (``control_plane``) |
| STATE | bulk | a worker or a joiner asks another one for a chunk of its state, or for a seat; the answer | is answered again |
| BYE | control | a worker that leaves; the other one answers with it, and both close | changes nothing |

A message of an exchange is identified by its ``Key``. The receiver opens the flow: it wants bytes of the earliest exchange
first, and never more than a window ahead. So a worker that is ahead does not fill its peer's link with its next round. In an
exchange of two each START also says that its sender is in the exchange, with a message of its own. A hint is a START with a
slot of its own (``HINT``). What was not asked for is dropped, and counted.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

from decent_dp.errors import WireError

# (round, bucket, slot): what a message is. Slots number the messages of one exchange.
Key: TypeAlias = tuple[int, int, int]

# Of the protocol: workers of another one are refused.
VERSION = 11
# The planes. The connection for what is short and must not wait;
CONTROL = 0
# and that for the bytes of messages.
BULK = 1
# The kinds of messages, as in the table above.
HELLO = 1
REFUSED = 2
BEAT = 3
START = 4
DATA = 5
VOTE = 6
CALL = 7
BLOCK = 8
STATE = 9
BYE = 10
# Slots of an exchange: the only message of a pair in each direction;
WHOLE = 0
# a hint: what the others need to encode for it, the body of its START;
HINT = 1
# and the messages of a group, for each chunk one up the tree and one down. Messages with an even slot need these two workers
# only; a mean, which goes down, needs others, too.
UP = 2
DOWN = 3
# Flag of a VOTE: the sender has the whole message, and mixes if the other has one, too.
GOT = 6
# Of a VOTE: it leaves the exchange out.
DROP = 7
# Of a VOTE: it waits for the other's.
ASK = 8
# Flag of a BEAT: the sender wants one in return.
ASKS = 1
# Of a BEAT: it makes no rounds at present.
PAUSES = 2
# Of a BEAT: bytes of its exchanges move.
MOVES = 4
# Flag of a START: its sender has this message, or one of its own with the same key, for the other.
OFFERS = 1
# Flag of a STATE: it is an answer.
ANSWERS = 1
# In place of a bucket: how many blocks of a collective have come.
ACK = 2**32 - 3
# In place of a bucket: a block of a collective, whose number is in place of a round and whose own number is the slot.
BLOCKS = 2**32 - 2
# In place of a bucket: an agreement's message.
AGREEMENT = 2**32 - 1
# Bytes of a frame's body, at most. A call of the control plane has a byte per block of a bucket.
LARGEST_FRAME = 2**20
# STARTs of exchanges to come that are kept of one peer.
_MOST_AHEAD = 2**16

# Kind, flags, version, epoch; round, bucket, slot; three numbers: of START the bytes had and wanted, of DATA the offset and the
# length, and of both the size of the whole message.
_HEADER = struct.Struct("<BBHIqIIQQQ")
HEADER_BYTES = _HEADER.size


class Header(NamedTuple):
    """What ``pack`` has packed."""

    kind: int
    flags: int
    epoch: int
    key: Key
    first: int
    second: int
    size: int


def pack(
    kind: int, key: Key = (0, 0, 0), flags: int = 0, first: int = 0, second: int = 0, size: int = 0, *, epoch: int = 0
) -> bytes:
    return _HEADER.pack(kind, flags, VERSION, epoch, *key, first, second, size)


def unpack(header: bytes, peer: int) -> Header:
    """The header that ``pack`` has made.

    Raises:
        WireError: it is none, or one of another version.
    """
    if len(header) != HEADER_BYTES:
        raise WireError(f"worker {peer} sent a header of {len(header)} bytes, where {HEADER_BYTES} were due")
    kind, flags, version, epoch, *key, first, second, size = _HEADER.unpack(header)
    if version != VERSION or not HELLO <= kind <= BYE:
        raise WireError(
            f"worker {peer} sent a message of kind {kind}, version {version}, where version {VERSION} was due. "
            "Start all workers from one installation."
        )
    return Header(kind, flags, epoch, tuple(key), first, second, size)


def check_ahead(peer: int, ahead: int) -> None:
    """Raises WireError if a peer has announced so many messages, or one of such a bucket, that memory may run out."""
    if ahead >= _MOST_AHEAD:
        raise WireError(f"worker {peer} has announced {ahead} messages ahead, or one of bucket {ahead}: too many")


def check_size(rank: int, peer: int, key: Key, theirs: int, ours: int) -> None:
    """Raises WireError when a message of ``peer`` has another size than the expected one."""
    if theirs != ours:
        raise WireError(
            f"round {key[0]}, bucket {key[1]}: worker {peer} has a message of {theirs} bytes where worker {rank} has one of "
            f"{ours}. The workers run different versions or have got out of step; start them together from one installation."
        )
