"""Waits for the results of agreements of all workers (``Transport.agree``)."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import Future

from decent_dp.errors import PeerLostError, PeerTimeoutError
from decent_dp.transport import Transport

__all__ = ["texts_of", "wait_for_all"]


def wait_for_all(
    transport: Transport, name: str, agreed: Future[Mapping[int, str]], timeout: float, what: str, late: str
) -> Mapping[int, str]:
    """Waits until all workers have contributed to an agreement; where faults are tolerated, all that live.

    Args:
        name, agreed: of the agreement.
        timeout: in seconds.
        what: as of ``Transport.agree``.
        late: a worker's failure to contribute in time, as the predicate of a sentence, for the error.

    Returns:
        The texts, by rank.

    Raises:
        PeerLostError: a worker is gone, and faults are not tolerated; or the others have gone on without this one.
        PeerTimeoutError: workers have not contributed within the timeout; names them.
    """
    futures.wait([agreed], timeout)
    if not agreed.done():
        missing = transport.missing(name)
        some = f"worker{'s' if len(missing) != 1 else ''} {', '.join(map(str, missing))}" if missing else "one of the workers"
        raise PeerTimeoutError(f"{some} {late}")
    return texts_of(transport, agreed, what)


def texts_of(transport: Transport, agreed: Future[Mapping[int, str]], what: str) -> Mapping[int, str]:
    """The result of an agreement that has one. Raises PeerLostError as ``wait_for_all``."""
    texts = agreed.result()
    if transport.rank not in texts:
        raise PeerLostError(
            f"the others took worker {transport.rank} for gone, and agreed on {what} without it: end this process."
        )
    return texts
