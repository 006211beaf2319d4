"""WHEN: from autograd's events to updates.

Every backward is one update, unless gradients are being accumulated. A bucket is updated in one of two moments, by the same
code. Streamed: at the first gradient that comes after its own were complete, while the rest of the backward goes on, so that
hooks of the user's on its last parameter still see the gradient. Deferred: when the backward has ended.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn import Parameter
from torch.optim import Optimizer

from decent_dp.handed import Policy
from decent_dp.replica.engine import Bucket, Engine
from decent_dp.transport import Handle, Transport

__all__ = ["Schedule", "Window", "refuse_trained_elsewhere"]

# How many of join's flags may be under way: it bounds how far one worker can run ahead of the slowest there.
_FLAGS_UNDER_WAY = 32


# Every schedule that is there: two on one parameter would step it twice.
_LIVING: weakref.WeakSet[Schedule] = weakref.WeakSet()
_LIVING_LOCK = threading.Lock()


class Window(enum.Enum):
    """What the gradients that are there are waiting for."""

    # Nothing is there. -> OPEN: a backward ends while gradients are accumulated.
    IDLE = "idle"
    # More may come. -> OWED: set_accumulate_grad(False). -> IDLE: the next backward without accumulation updates; zero_grad.
    OPEN = "open"
    # The window is complete. -> IDLE: the next backward joins it and updates, or whoever would observe it updates first.
    OWED = "owed"


class _End:
    """The callback by which autograd's engine tells that a backward has ended.

    The engine holds it as long as the backward lives. So when it is gone without a call, the backward has raised.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = weakref.ref(schedule)

    def __call__(self) -> None:
        schedule = self._schedule()
        if schedule is not None:
            schedule.end_backward()


@dataclass(frozen=True)
class _Backward:
    """A backward that is under way.

    Attributes:
        task: autograd's number for it; that of a backward inside it differs.
        end: dead once the engine has let go of it.
        accumulating: as it was when the backward began: it may end, or raise, after ``no_sync`` was left.
        expected: it reaches parameters, so that it is an update even if it raises before the first gradient.
        arrived: the parameters whose gradients came in it.
    """

    task: int
    end: weakref.ref[_End]
    accumulating: bool
    expected: bool
    arrived: set[int]

    @property
    def lost(self) -> bool:
        """It raised: the engine has let go of it without telling its end."""
        return self.end() is None


class Schedule:
    """Turns the gradients of one replica into rounds.

    Args:
        params: the trainable parameters, in registration order.
        engine: carries the buckets' updates out.
        policy: what happens to gradients before the step.
        build: makes the buckets, from the order in which the gradients came; called once, at the first update.
        began: called when a round begins, before any bucket is touched.
        overlap: mix with what was sent an update ago (True), or with this update's values (False).

    Attributes:
        window: see ``Window``.
        accumulate: gradients are kept for a later backward (``set_accumulate_grad``).
        paused: how many ``no_sync`` contexts are open.
        joining: inside ``join``: every round tells the others that this worker is active.
        at_boundary: called after each round; what it raises leaves the replica as it is.
        nested: gradients have come from a backward inside a backward (reentrant checkpointing): their order says nothing.
        arrived: the first backward's order of parameters, until the buckets are made from it.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        engine: Engine,
        policy: Policy,
        transport: Transport,
        build: Callable[[Sequence[int]], list[Bucket]],
        began: Callable[[], None],
        *,
        overlap: bool,
    ) -> None:
        self._params = params
        self._engine = engine
        self._policy = policy
        self._transport = transport
        self._build, self._began = build, began
        self._overlap = overlap
        self.window = Window.IDLE
        self.accumulate = False
        self.paused = 0
        self.joining = False
        self.closed = False
        self.at_boundary: Callable[[], None] | None = None
        self._flags: deque[Handle] = deque()
        self._fault: BaseException | None = None
        # On a GPU, hooks of CPU and CUDA parameters run in different threads.
        self._lock = threading.RLock()

        self._backward: _Backward | None = None
        self.nested = False
        self.arrived: dict[int, None] = {}
        # The round that is under way: whether it has begun, and which bucket is next to be updated.
        self._begun = False
        self._stepped = False
        self._next = 0
        self._bucket_of: dict[int, int] = {}
        self._missing: list[int] = []

        me = weakref.ref(self)
        untyped: Sequence[Any] = params  # torch does not type its hooks
        self._hooks = [p.register_post_accumulate_grad_hook(_gradient_hook(me, i)) for i, p in enumerate(untyped)]
        with _LIVING_LOCK:
            _LIVING.add(self)

    # -- what autograd tells ------------------------------------------------------------------------------------------

    def watch(self, output: Any) -> None:
        """Hooks the tensors of a forward's output, whose backward then tells its beginning from outside any inner one."""
        me = weakref.ref(self)

        def hook(_: Tensor) -> None:
            schedule = me()
            if schedule is not None:
                schedule.enter_backward()

        tensor: Any
        for tensor in _tensors(output):
            # A leaf would keep the hook for good.
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(hook)

    def enter_backward(self) -> _Backward:
        """Notes that a backward is running; its end is told by a callback of the engine's."""
        with self._lock:
            self.recover()
            if self._backward is None:
                end = _End(self)
                engine: Any = Variable._execution_engine
                engine.queue_callback(end)
                self._backward = _Backward(
                    torch._C._current_graph_task_id(), weakref.ref(end), self.accumulating, self._reaches_parameters(), set()
                )
                self._missing = [len(bucket.block.params) for bucket in self._engine.buckets]
            return self._backward

    def _reaches_parameters(self) -> bool:
        """Whether the backward that is running accumulates gradients in parameters (torch.autograd.grad does not)."""
        edges = (torch.autograd.graph.get_gradient_edge(param) for param in self._params if param.requires_grad)
        try:
            return any(torch._C._will_engine_execute_node(edge.node) for edge in edges)
        except RuntimeError:
            return False  # so torch answers for a leaf that torch.autograd.grad was asked for

    def gradient(self, index: int) -> None:
        """A parameter's gradient has been accumulated."""
        with self._lock:
            self.check()
            backward = self.enter_backward()
            self.nested |= torch._C._current_graph_task_id() != backward.task
            if not self._engine.buckets:
                self.arrived.setdefault(index)
            elif not backward.accumulating:
                if not (self.nested or self._policy.needs_all):
                    self._advance()
                bucket = self._bucket_of[index]
                if index not in backward.arrived:
                    self._missing[bucket] -= 1
                if bucket < self._next:
                    warnings.warn(
                        "a gradient came after its bucket was updated, from a backward inside the backward: it joins the next "
                        "update. From now on updates wait for the end of the backward.",
                        stacklevel=2,
                    )
            backward.arrived.add(index)

    def end_backward(self) -> None:
        """The outermost backward has ended, without an error."""
        with self._lock:
            backward, self._backward = self._backward, None
            if backward is None or not backward.arrived:
                return  # autograd.grad, or a loss that no parameter takes part in
            if backward.accumulating:
                self.window = Window.OPEN
            else:
                self._update(step=True)

    # -- windows ------------------------------------------------------------------------------------------------------

    @property
    def accumulating(self) -> bool:
        return self.accumulate or self.paused > 0

    def set_accumulate(self, enable: bool) -> None:
        self.settle()
        self.accumulate = enable
        held = any(param.grad is not None for param in self._params)
        if not self.accumulating and self.window is Window.OPEN and held:
            self.window = Window.OWED

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        self.settle()
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def settle(self) -> None:
        """Does what is due before anybody looks: the rest of a round whose backward raised, and an owed update.

        Inside a backward nothing is due yet.
        """
        if torch._C._current_graph_task_id() != -1:
            return
        with self._lock:
            self.recover()
            if self.window is Window.OWED and not self.failed:
                self._update(step=True)

    def refuse_inside(self, what: str) -> None:
        """Raises RuntimeError inside a backward, for a call of the user's named ``what``."""
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(f"{what} was called inside a backward: call it after the backward has returned.")

    def settle_for(self, what: str) -> None:
        """Comes to a step boundary, for a call of the user's named ``what``.

        Raises:
            RuntimeError: inside a backward; after an update that failed half-way.
        """
        self.refuse_inside(what)
        if not self.failed:
            self.settle()
        if self._fault is not None:
            raise RuntimeError(
                f"{what} came after an update that failed half-way ({type(self._fault).__name__}: {self._fault}): this replica "
                "is out of step with the others. Start the workers again from what was saved before."
            ) from self._fault

    def recover(self) -> None:
        """If the last backward raised half-way, makes the rest of its round: the others have made it, too. No step."""
        with self._lock:
            backward = self._backward
            if backward is None or not backward.lost:
                return
            self._backward = None
            if backward.accumulating:
                self.window = Window.OPEN if backward.arrived else self.window
            elif (backward.arrived or backward.expected or self._begun) and not self.failed:
                self._update(step=False)

    def discarded(self) -> None:
        """The caller has cleared the gradients."""
        if self.window is Window.OPEN:
            self.window = Window.IDLE

    def update(self) -> None:
        """One update with the gradients that are there now."""
        self.refuse_inside("update()")
        with self._lock:
            self.recover()
            self._update(step=True)

    # -- rounds -------------------------------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """An update has failed, and no other can be made; what is there can still be looked at and saved."""
        return self._fault is not None

    def check(self) -> None:
        """Raises RuntimeError when no update can be made any more."""
        if self.closed:
            raise RuntimeError("the wrapper was closed: train before close(), or use model.module on its own.")
        if self._fault is not None:
            raise RuntimeError(
                f"an update failed earlier ({type(self._fault).__name__}: {self._fault}), and this replica is out of step with "
                "the others: start the workers again."
            ) from self._fault

    def close(self) -> None:
        """Lets go of the parameters."""
        self.closed = True
        for hook in self._hooks:
            hook.remove()

    def trains(self, param: Parameter) -> bool:
        """Whether this schedule updates ``param``."""
        return not self.closed and any(param is own for own in self._params)

    def mix_only(self) -> None:
        """One round without a step; gradients that are there stay."""
        with self._lock:
            self._update(step=False, keep=True)

    def anybody_active(self) -> bool:
        """In ``join``, for a worker that has run out: whether any other makes the coming update."""
        flag = torch.zeros(1, device="cpu")
        self._transport.control.mean(flag).wait()
        # Flags are summed in order: all of ours are in.
        while self._flags:
            self._flags.popleft().wait()
        return bool(flag.item() > 0)

    def _advance(self) -> None:
        """Updates the buckets that are complete, in the order that is the same on all workers."""
        with self.faults():
            while self._next < len(self._missing) and self._missing[self._next] == 0:
                self._begin_round(active=True)
                self._update_bucket(step=True, keep=False)

    def _update(self, *, step: bool, keep: bool = False) -> None:
        """Makes the rest of a round: all buckets that were not updated while the gradients came."""
        self.check()
        # An owed update may be made from inside an evaluation: what it allocates has to train later.
        with self.faults(), torch.inference_mode(False):
            self._begin_round(active=not keep)
            step = step and self._policy.allows_step()
            while self._next < len(self._engine.buckets):
                self._update_bucket(step=step, keep=keep)
            if not self._overlap:
                for bucket in self._engine.buckets:
                    self._engine.finish(bucket)
            self._engine.let_go()
            self._next, self._begun = 0, False
            self._engine.round += 1
            self._engine.steps += step
        if not keep:
            self.window = Window.IDLE
        self._transport.report("")  # what went wrong before did not end the run
        if self.at_boundary is not None:
            self.at_boundary()

    def _update_bucket(self, *, step: bool, keep: bool) -> None:
        bucket = self._engine.buckets[self._next]
        if self._overlap:
            self._engine.finish(bucket)
        if step:
            self._engine.step(bucket)
            self._stepped = True
        elif self._stepped:
            self._engine.pass_step(bucket)  # buckets before it had stepped when the backward raised: one rate for all
        if not keep:
            for param in bucket.block.params:
                param.grad = None
        self._engine.start(bucket)
        self._next += 1

    def _begin_round(self, *, active: bool) -> None:
        if self._begun:
            return
        self._begun, self._stepped = True, False
        if self.joining and active:
            # Before any other collective of this round: who has run out is waiting for it.
            self._flags.append(self._transport.control.mean(torch.ones(1, device="cpu")))
            if len(self._flags) > _FLAGS_UNDER_WAY:
                self._flags.popleft().wait()
        if not self._engine.buckets:
            self.install(self._build(list(self.arrived)))
        self._began()
        for bucket in self._engine.buckets:
            bucket.block.adopt()

    def install(self, buckets: list[Bucket]) -> None:
        """These take the place of all buckets that there were."""
        self._engine.install(buckets)
        position = {id(param): index for index, param in enumerate(self._params)}
        self._bucket_of = {position[id(param)]: i for i, bucket in enumerate(buckets) for param in bucket.block.params}

    @contextlib.contextmanager
    def faults(self) -> Iterator[None]:
        """What raises in it leaves a replica that cannot be updated any more."""
        try:
            yield
        except BaseException as error:
            self._fault = error
            self._transport.report(f"{type(error).__name__}: {error}")
            raise


def refuse_trained_elsewhere(model: nn.Module) -> None:
    """Raises ValueError when another wrapper, which was neither closed nor dropped, trains a parameter of ``model``."""

    def shared() -> str | None:
        named = model.named_parameters()
        with _LIVING_LOCK:
            living = list(_LIVING)
        return next((name for name, param in named if any(schedule.trains(param) for schedule in living)), None)

    if shared() is None:
        return
    gc.collect()  # a wrapper that was dropped is in a cycle
    name = shared()
    if name is not None:
        raise ValueError(
            f"parameter '{name}' is trained by another DecentralizedDataParallel, and two would step it twice: close() the "
            "other one first."
        )


def _gradient_hook(schedule: weakref.ref[Schedule], index: int) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        target = schedule()
        if target is not None:
            target.gradient(index)

    return hook


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in a model's output: containers, dataclasses and plain objects, whatever the nesting."""
    seen: set[int] = set()
    stack = [output]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            yield item
        elif id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, Mapping):
                stack.extend(item.values())
            elif isinstance(item, (list, tuple, set, frozenset, deque)):
                stack.extend(item)
            elif not isinstance(item, (type, nn.Module, Optimizer)):
                stack.extend(getattr(item, "__dict__", {}).values())
