"""Small models and loops that several test files share."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decent_dp import gossip
from decent_dp.compression import Compression, FlatTensor, Int8, Lossless
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.transport import ExchangeId, ExchangeRequest, InProcessTransport

ROOT = Path(__file__).parents[1]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def covering(cases: Sequence[Any]) -> list[Any]:
    """A part of ``cases``, dataclasses or tuples, in which each value of each field and option occurs.

    Of cases that add as many values, the one whose other values occurred least: so pairs of values differ, too.
    """
    values = [set(_values_of(case)) for case in cases]
    missing, chosen, occurred = set().union(*values), [], Counter[Any]()
    while missing:
        best = max(range(len(cases)), key=lambda i: (len(values[i] & missing), -sum(occurred[v] for v in values[i])))
        chosen.append(best)
        occurred.update(values[best])
        missing -= values[best]
    return [cases[i] for i in sorted(chosen)]


def _values_of(case: Any) -> Iterable[tuple[Any, ...]]:
    for name, value in (vars(case) if dataclasses.is_dataclass(case) else dict(enumerate(case))).items():
        yield from ((name, key, repr(one)) for key, one in value.items()) if isinstance(value, dict) else [(name, repr(value))]


def some_and_all(cases: Sequence[Any]) -> Any:
    """Passes ``cases`` to a test: in the fast tests a part in which each value occurs, in the slow ones all."""
    return pytest.mark.parametrize("cases", [covering(cases), pytest.param(cases, marks=pytest.mark.slow)], ids=["some", "all"])


def some_in_the_fast_tests(*values: Iterable[Any]) -> list[Any]:
    """All combinations of values, for ``parametrize``: in the fast tests a part in which each value occurs."""
    cases = list(itertools.product(*values))
    fast = covering(cases)
    return [case if case in fast else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def seed_cpu(seed: int) -> None:
    """As ``torch.manual_seed``, which takes half a millisecond to note, with a traceback, what it would do on other devices."""
    torch.default_generator.manual_seed(seed)


def net(seed: int = 0) -> nn.Sequential:
    seed_cpu(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))


def batch(t: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + t)
    return torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)


def loss(model: Any, t: int, rank: int = 0) -> Tensor:
    x, y = batch(t, rank)
    result: Tensor = (model(x) - y).square().mean()
    return result


def alone(model: nn.Module, optim_fn: Any = SGD, **options: Any) -> DecentralizedDataParallel:
    """The wrapper of a single worker; no process group is needed."""
    return DecentralizedDataParallel(model, optim_fn, transport=InProcessTransport(), **options)


class Heard(logging.Handler):
    """What the library logs in this process from now on: the levels and texts."""

    def __init__(self, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self.lines: list[tuple[int, str]] = []
        logger = logging.getLogger("decent_dp")
        logger.addHandler(self)
        logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))

    @property
    def texts(self) -> list[str]:
        return [text for _, text in self.lines]


class Driven:
    """A worker's training by either driver, with the same calls.

    Args:
        at: None for one worker alone, 'processes', or the transport of a thread.

    Attributes:
        user: the wrapper, or what ``gossip`` has returned. ``replica``: its driver.
        forward: what computes the loss.
    """

    def __init__(self, driver: str, model: nn.Module, at: Any = None, optim_fn: Any = SGD, **options: Any) -> None:
        self.model, transport = model, InProcessTransport() if at is None else None if at == "processes" else at
        self.optimizer = optim_fn(list(model.parameters())) if driver == "gossip" else None
        if self.optimizer is None:
            self.user: Any = DecentralizedDataParallel(model, optim_fn, transport=transport, **options)
        else:
            self.user = gossip(model, self.optimizer, transport=transport, **options)
        self.forward = model if self.optimizer is not None else self.user
        self.replica = self.user.replica

    def step(self, t: int) -> None:
        loss(self.forward, t, self.replica.world.rank).backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def steps(self, *batches: int) -> Driven:
        for t in batches:
            self.step(t)
        return self

    def finish(self) -> None:
        """Ends the exchange in flight, without a step."""
        if self.optimizer is None:
            self.user.update()
        else:
            self.user.flush()


DRIVERS = pytest.mark.parametrize("driver", ["wrapper", "gossip"])


def beside(model: nn.Module, step: Any, optim_fn: Any = SGD, steps: int = 4, tolerance: float = 0.0, **options: Any) -> Any:
    """Runs ``step(model, t) -> loss`` in the wrapper and in plain PyTorch; parameters must agree after every step."""
    twin = copy.deepcopy(model)
    optimizer = optim_fn(list(twin.named_parameters()))
    wrapper = alone(model, optim_fn, **options)
    for t in range(steps):
        optimizer.zero_grad()
        step(twin, t).backward()
        optimizer.step()
        step(wrapper, t).backward()
        assert wrapper.stats().rounds == t + 1
        assert_same(wrapper, twin, tolerance)
    return wrapper


class SilentStore:
    """A store whose process is stopped unless ``answers`` is set: it does not answer, and does not fail."""

    def __init__(self, store: Any) -> None:
        self._store, self.answers = store, threading.Event()
        self.answers.set()

    def __getattr__(self, name: str) -> Any:
        self.answers.wait()
        return getattr(self._store, name)


def silent_store(store: Any) -> Any:
    """A store that does not answer."""
    silent = SilentStore(store)
    silent.answers.clear()
    return silent


def broken_store(store: Any) -> Any:
    """A store that is gone."""
    return BrokenStore()


class BrokenStore:
    """A store whose server is gone."""

    def set(self, *_: Any) -> None:
        raise RuntimeError("connection was reset\nException raised from recvBytes\n#0 frame")

    check = get = add = set


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_same(a: nn.Module | dict[str, Tensor], b: nn.Module | dict[str, Tensor], tolerance: float = 0.0) -> None:
    a = values(a) if isinstance(a, nn.Module) else a
    b = values(b) if isinstance(b, nn.Module) else b
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


def plain(
    model: nn.Module, windows: list[list[int]], optim_fn: Any = SGD, scale: Callable[[int], float] | None = None
) -> nn.Module:
    """Ordinary PyTorch: one optimizer step per window, over the sum of the gradients of its batches."""
    twin = copy.deepcopy(model)
    optimizer = optim_fn(list(twin.named_parameters()))
    for window in windows:
        optimizer.zero_grad()
        for t in window:
            (loss(twin, t) / (scale(len(window)) if scale else 1.0)).backward()
        optimizer.step()
    return twin


def compression_of(values: Sequence[Tensor], kind: type[Compression] = Lossless) -> Compression:
    """A compression for flat tensors, numbered in their order."""
    return kind([FlatTensor(i, value.numel()) for i, value in enumerate(values)], values[0].dtype, values[0].device)


def expect_the_most(compression: Compression, values: Sequence[Tensor]) -> None:
    """Makes the first range of an int8 compression wide enough for any two replicas."""
    if isinstance(compression, Int8):
        compression.hint(values)
        compression._expected = 2 * compression._largest


def request(
    values: Tensor,
    rank: int,
    exchange_id: ExchangeId,
    kind: type[Compression] = Lossless,
    compression: Compression | None = None,
) -> ExchangeRequest:
    """One flat tensor, ready to be exchanged; the receive buffer is filled with ones."""
    if compression is None:
        compression = compression_of([values], kind)
        expect_the_most(compression, [values])
    sent, received = (torch.full((compression.nbytes,), 255, dtype=torch.uint8) for _ in range(2))
    return ExchangeRequest(compression, [values], sent, received, compression.hint([values]), rank, exchange_id)


def came(request: ExchangeRequest) -> Tensor:
    """The values received by a lossless compression with one flat tensor."""
    [tensor] = request.compression.tensors
    return request.received.view(request.compression.dtype)[: tensor.numel]


def listening(process: int | str = "self") -> set[str]:
    """'address:port', in the kernel's hexadecimal, on which this process listens, or another one."""
    own = set()
    for entry in os.listdir(f"/proc/{process}/fd"):
        try:
            target = os.readlink(f"/proc/{process}/fd/{entry}")
        except OSError:
            continue
        if target.startswith("socket:["):
            own.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as file:
            rows = [line.split() for line in file.readlines()[1:]]
        found |= {row[1] for row in rows if row[3] == "0A" and row[9] in own}
    return found


def errors_of(calls: Iterable[Callable[[], Any]], error: type[Exception], match: str) -> list[str]:
    """The messages of calls that each raise ``error`` with ``match`` in it."""
    messages = []
    for call in calls:
        with pytest.raises(error, match=match) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def error_of(call: Callable[[], Any]) -> str:
    """The error that a call raises, as 'Kind: text'; '' if none. Also in threads, which share pytest's filters of warnings."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def wait_for(condition: Callable[[], Any], seconds: float = 20.0, what: str = "") -> Any:
    """What ``condition`` returns as soon as it is true. ``what``: is not, in the error."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return found
