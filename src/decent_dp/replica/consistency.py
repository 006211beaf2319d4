"""Calls of all workers, and checks between them: an error on one worker is raised on all, with the same text."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from itertools import zip_longest
from typing import Any, TypeVar

from torch import nn

from decent_dp import errors
from decent_dp.engine.layout import TensorSpec
from decent_dp.membership import Members
from decent_dp.replica.optimizer_guards import first_difference, warn_user
from decent_dp.replica.shards import placement
from decent_dp.transport import Collectives, Transport

__all__ = [
    "among_the_same",
    "broadcast_object",
    "call_on_all",
    "check_consistency",
    "check_same_call",
    "compare",
    "error_of_worker",
    "gather_by_rank",
    "model_signature",
    "texts_of",
    "wait_for_all",
    "worker_counts",
]

T = TypeVar("T")

# Errors of these types are raised as the same type on the other workers. Others become a RuntimeError that names the type.
_SHARED_TYPES: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError, *(getattr(errors, name) for name in errors.__all__))
}


def call_on_all(control: Collectives, attempt: Callable[[], T]) -> T:
    """Calls ``attempt`` on every worker and returns its value. If it fails on one of them, all raise the same error."""
    found: list[T] = []
    failure: Exception | None = None
    try:
        try:
            found.append(attempt())
        except errors.PeerError:
            raise  # there is no complete set of workers to report to
        except Exception as error:
            failure = error
        own = None if failure is None else [type(failure).__name__, errors.shortened(str(failure))]
        outcomes = control.gather(own)
        failed = [(rank, outcome) for rank, outcome in zip(control.ranks, outcomes, strict=True) if outcome is not None]
        if failure is not None and all(outcome == own for outcome in outcomes):
            raise failure
        if failed:
            rank, (kind, text) = failed[0]
            raise error_of_worker(kind, text, f"worker {rank}") from failure
    finally:
        del failure  # a reference cycle with this frame would keep connections alive that are to be closed
    return found[0]


def check_consistency(control: Collectives, rank: int, attempt: Callable[[], tuple[T, dict[str, Any]]]) -> T:
    """As ``call_on_all``, for an ``attempt`` that also returns a signature, which must be equal on all workers: JSON with some
    of the keys 'model' (``model_signature``), 'topology', 'settings' and 'optimizers' (dicts by name).

    Raises:
        DisagreementError: on all workers; names the first difference from worker 0. Of a rate that differs all warn.
    """
    value, signature = call_on_all(control, attempt)
    reference, own = broadcast_object(control, rank, signature), json.loads(json.dumps(signature))
    call_on_all(control, lambda: compare(reference, own, rank))
    rates = first_difference(reference.get("optimizers", {}), own.get("optimizers", {}), rates=True)
    texts = control.gather(
        None if rates is None else f"{rates} is {rates.theirs} on worker 0 and {rates.ours} on worker {rank}"
    )
    for text in list(filter(None, texts))[:1]:
        warn_user(
            f"the workers train with different rates: {text}. Pass the same on every worker, unless that is what you want."
        )
    return value


def broadcast_object(control: Collectives, rank: int, message: Any) -> Any:
    """Returns the ``message`` (JSON) of the first worker on all of them."""
    return among_the_same(control, lambda: control.gather(message if rank == control.ranks[0] else None)[0])


def gather_by_rank(control: Collectives, value: Any) -> dict[int, Any]:
    """Returns the ``value`` (JSON) of each worker.

    Raises:
        TypeError: it is something else; on all workers.
    """

    def check() -> None:
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"gather takes numbers, strings, lists and dicts of them, got {type(value).__name__} ({error}). Of a tensor "
                "pass item() or tolist()."
            ) from None

    call_on_all(control, check)
    found = control.gather(value)
    return dict(zip(control.ranks, found, strict=True))


def among_the_same(control: Collectives, call: Callable[[], T]) -> T:
    """Returns the result of ``call``, which makes several collectives, with the same workers from the first to the last.

    If one dies in between, it is called again. It must not change what it reads.
    """
    while True:
        ranks = control.ranks
        result = call()
        if control.ranks == ranks:
            return result


def wait_for_all(
    transport: Transport, name: str, agreed: Future[Mapping[int, str]], timeout: float, what: str, late: str
) -> Mapping[int, str]:
    """The texts, by rank, of an agreement to which all workers contribute; where faults are tolerated, all that live.

    Args:
        what: needs it, for errors. ``timeout``: in seconds.
        late: a worker's failure to contribute in time, as the predicate of a sentence, for the error.

    Raises:
        PeerLostError: a worker is gone, and faults are not tolerated; or the others have gone on without this one.
        PeerTimeoutError: workers have not contributed within the timeout; names them.
    """
    futures.wait([agreed], timeout)
    if not agreed.done():
        missing = transport.plane.missing(name)
        some = f"worker{'s' if len(missing) != 1 else ''} {', '.join(map(str, missing))}" if missing else "one of the workers"
        raise errors.PeerTimeoutError(f"{some} {late}")
    return texts_of(transport, agreed, what)


def texts_of(transport: Transport, agreed: Future[Mapping[int, str]], what: str) -> Mapping[int, str]:
    """The result of an agreement that has one. Raises PeerLostError as ``wait_for_all``."""
    texts = agreed.result()
    if transport.rank not in texts:
        raise errors.PeerLostError(
            f"the others took worker {transport.rank} for gone, and agreed on {what} without it: end this process."
        )
    if transport.neighbours is None and (absent := [rank for rank in range(transport.world_size) if rank not in texts]):
        raise transport.explain(None, absent, what)
    return texts


def check_same_call(control: Collectives, round_: int, factor: float, what: str, members: Members) -> list[int]:
    """Checks, before a collective call of the user's named ``what``, that all workers make this one, at the same round and with
    the same adaptive factor: different ones would let the mean over the replicas drift. Returns the rounds of all.

    Raises:
        PeerTimeoutError: not all workers made the call.
        OutOfStepError: the workers have made different numbers of updates, or make different calls; on all of them.
        DisagreementError: the adaptive factors differ; on all of them.
    """
    try:
        rounds, factors = map(list, zip(*control.gather([round_, factor]), strict=True))
    except errors.PeerTimeoutError as error:
        raise errors.PeerTimeoutError(
            f"not all workers called {what}: every worker must call it, also where only one uses the result (put "
            f"`if rank == 0:` inside averaged(), not around it). {error}"
        ) from error
    ranks = control.ranks
    if len(set(rounds)) > 1:
        made = worker_counts(rounds, ranks)
        text = f"{what} needs all workers at the same update, and they have made different numbers ({made})."
        members.refuse(errors.OutOfStepError(f"{text} Uneven numbers of batches need join() around the loop."))
    odd = next((i for i, own in enumerate(factors) if own != factors[0]), None)
    if odd is not None:
        raise errors.DisagreementError(
            f"the adaptive factor is {factors[0]!r} on worker {ranks[0]} and {factors[odd]!r} on worker {ranks[odd]}, so "
            "mixing moves the mean over the replicas: call set_adaptive_factor with the same factor on every worker, at the "
            "same update."
        )
    return rounds


def error_of_worker(kind: str, text: str, prefix: str) -> Exception:
    """Returns the error of another worker, of the class named ``kind`` if that is shared, with ``prefix`` in its text."""
    shared = _SHARED_TYPES.get(kind)
    return RuntimeError(f"{prefix}: {kind}: {text}") if shared is None else shared(f"{prefix}: {text}")


def worker_counts(numbers: Sequence[int], ranks: Sequence[int] | None = None) -> str:
    """Formats one number per worker for a message; ``ranks``: of the workers, if not all are there."""
    return ", ".join(f"worker {rank}: {count}" for rank, count in zip(ranks or range(len(numbers)), numbers, strict=True))


def model_signature(model: nn.Module, trains: Container[int] | None = None) -> list[list[Any]]:
    """Returns one entry per tensor of the model, with all properties that must be equal on all workers.

    ``trains``: the ids of the parameters that train, which may be frozen for a while; None: those that require a gradient.
    """
    entries: list[list[Any]] = []
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            is_trained = tensor.requires_grad if trains is None else id(tensor) in trains
            how, trained = placement(tensor), "trained" if is_trained else "frozen"
            stride = tensor.stride() if how else TensorSpec.of(name, tensor).stride
            what = f"{trained}, {how}" if how else trained
            entries.append([kind, name, list(tensor.shape), str(tensor.dtype), list(stride), what])
    return entries


def compare(reference: Mapping[str, Any], own: Mapping[str, Any], rank: int) -> None:
    """Raises DisagreementError with the first difference between the signature of worker 0 and that of this worker."""
    for i, (theirs, ours) in enumerate(zip_longest(reference.get("model", []), own.get("model", []))):
        if theirs != ours:
            raise errors.DisagreementError(
                f"the models differ between workers, first in tensor {i}: worker 0 has {_describe(theirs)}, worker {rank} "
                f"has {_describe(ours)}. Build the same model on every worker."
            )
    differences: list[tuple[str, object, Any, Any]] = []
    for part, verb in (("topology", "differs"), ("settings", "differ")):
        theirs, ours = reference.get(part, {}), own.get(part, {})
        keys = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
        differences += [(f"the {part} {verb}", key, theirs.get(key), ours.get(key)) for key in keys]
    found = first_difference(reference.get("optimizers", {}), own.get("optimizers", {}))
    if found is not None:
        differences.append(("the optimizers differ", found, found.theirs, found.ours))
    for what, key, theirs, ours in differences[:1]:
        raise errors.DisagreementError(
            f"{what} between workers: {key} is {theirs!r} on worker 0 and {ours!r} on worker {rank}. Pass the same arguments "
            "on every worker."
        )


def _describe(entry: list[Any] | None) -> str:
    if entry is None:
        return "none"
    kind, name, shape, dtype, stride, trained = entry
    return f"{kind} '{name}' {tuple(shape)} {dtype.removeprefix('torch.')}, {trained}, strides {tuple(stride)}"
