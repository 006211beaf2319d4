"""The exceptions of this library.

Each derives from the built-in type that users would catch:

    Exception
    ├── ValueError
    │   └── DisagreementError      models, optimizers, settings or topologies differ between workers
    └── RuntimeError
        ├── PeerError              an exchange failed because of another worker
        │   ├── PeerLostError      it is gone, or gives no sign of life: it raised, exited, was killed, or cannot be reached
        │   └── PeerTimeoutError   it is connected but sent nothing within the process group's timeout
        ├── WireError              a message arrived that was not expected
        ├── OutOfStepError         the workers have made different numbers of updates, or different collective calls
        ├── NonFiniteError         a replica holds a NaN or an infinity
        └── CheckpointError        a file of a checkpoint is missing, damaged or from another run
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "DisagreementError",
    "NonFiniteError",
    "OutOfStepError",
    "PeerError",
    "PeerLostError",
    "PeerTimeoutError",
    "WireError",
]


class DisagreementError(ValueError):
    """Models, optimizers, settings or topologies differ between workers; the message names the first difference."""


class PeerError(RuntimeError):
    """An exchange failed because of another worker; the message names its rank."""


class PeerLostError(PeerError):
    """A worker is gone or gives no sign of life: it raised, exited, was killed, is stopped or cannot be reached."""


class PeerTimeoutError(PeerError):
    """A worker is connected but sent nothing within the process group's timeout."""


class WireError(RuntimeError):
    """A message arrived that was not expected (another round, bucket or length)."""


class OutOfStepError(RuntimeError):
    """The workers have made different numbers of updates, or different collective calls."""


class NonFiniteError(RuntimeError):
    """A replica holds a NaN or an infinity, and cannot be mixed; the message names the worker and a parameter."""


class CheckpointError(RuntimeError):
    """A file of a checkpoint is missing, damaged or from another run; the message names the file and the cause."""

    def __init__(self, text: str) -> None:
        super().__init__(shortened(text))


def shortened(text: str) -> str:
    """A text without its middle, if it is long: messages quote what files contain."""
    return text if len(text) <= 2000 else f"{text[:1000]} ... {text[-1000:]}"
