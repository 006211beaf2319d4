"""Many workers in one process: the mathematical twin of decentralized training."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from decent_dp._checks import check_bool, check_integer, check_number, to_float
from decent_dp.arguments import LR_SCHEDULER_FN_TYPE, OPTIM_FN_TYPE, check_factories, check_scaler
from decent_dp.compression import check_compression, for_momentum
from decent_dp.engine import fit_rule
from decent_dp.optim.tracking import FADE_EVERY, rule_for
from decent_dp.rules import Gossip, MomentumTracking, Rule
from decent_dp.rules.rule import check_rule
from decent_dp.tools.sim.absences import RANKS_TYPE, Faults
from decent_dp.tools.sim.exchange import SimulatedExchange, make_exchanges
from decent_dp.tools.sim.losses import LOSS_FN_TYPE, Gradients, Loop, VectorizedPass
from decent_dp.tools.sim.stack import Stack
from decent_dp.tools.sim.steppers import make_stepper
from decent_dp.topo import Topology, make_topology
from decent_dp.topo.schedule import check_pairs, share_of, weigh

__all__ = ["VirtualCluster"]


class VirtualCluster:
    """n replicas of a model that train and mix as n workers would under ``DecentralizedDataParallel``.

    A step is one update of every replica: gradients at its parameters, the mix with the values that its neighbours sent in the
    last update, the optimizer's step, and the new parameters are sent (``overlap=False``: the optimizer's step, then the mix).
    With the same batches the result is that of real workers up to rounding. Replicas have their own buffers, optimizer states,
    clipping and scalers, and share one stream of torch's random numbers, so that dropout differs from that of any real run.

    All replicas are computed in one pass of ``torch.func.vmap``. A model that does not allow this (its Python code depends on
    values, it checkpoints activations, it has backward hooks on modules or sparse gradients, it draws random numbers in
    Python, it keeps parameters or buffers in lists beside their names) gets a RuntimeError; with ``vectorize=False`` its
    replicas are computed one after another. In one pass Python code runs once per step for all replicas: a counter in a
    module counts steps, as a worker's would.

    Args:
        model: the first value of all replicas, on its device; copied, never changed. Each of its modules stays in its mode
            (training or evaluation).
        optim_fn: makes an optimizer from (name, parameter) pairs. Called at construction: once for an optimizer of torch's or
            this library's that is known to work element by element, with ``vectorize`` and no scaler; else once per replica.
        topology: a registered name, a composition such as 'complete:100,ring', or a ``Topology``.
        n: the number of workers.
        loss_fn: called as ``loss_fn(model, *batch)`` with one replica's model and batch, returns its loss as one number. None:
            the cross entropy of ``model(x)`` and ``y``.
        lr_scheduler_fn: makes a scheduler for an optimizer; stepped once per optimizer step. None for none.
        local_world_size: workers per node, for topologies that depend on it.
        compression: None (the parameters' own dtype), 'bfloat16', 'int8', or for pairs '4bit', '2bit', '1bit' and 'low-rank:R'
            (also with ',int8' or ',bfloat16').
        overlap: mix with the values sent in the last update (True), or with this update's values (False).
        mix_every: mix each parameter only in every h-th update, in turns.
        rule: of ``decent_dp.rules``, such as ``OuterNesterov()``; None for plain gossip.
        grad_clip_norm: of each replica's gradients together, as ``torch.nn.utils.clip_grad_norm_``; 0.0 for no clipping.
        scaler: a ``torch.GradScaler``; each replica gets a copy, which scales its loss, skips its steps and is updated.
        vectorize: True: all replicas in one pass, or raise; False: one replica after another, each with Python objects of its
            own.
        weights: of the replicas, as the argument ``weight`` of ``gossip``; None: all equal.

    Attributes:
        round: the number of the next step; counts steps, also those that a scaler skipped.
        vectorized: as the argument.

    Raises:
        ValueError, TypeError: an argument is wrong; the message says what to do.
    """

    def __init__(
        self,
        model: nn.Module,
        optim_fn: OPTIM_FN_TYPE,
        topology: str | Topology,
        n: int,
        *,
        loss_fn: LOSS_FN_TYPE | None = None,
        lr_scheduler_fn: LR_SCHEDULER_FN_TYPE | None = None,
        local_world_size: int = 1,
        compression: str | None = None,
        overlap: bool = True,
        mix_every: int = 1,
        rule: Rule | None = None,
        grad_clip_norm: float = 0.0,
        scaler: torch.amp.GradScaler | None = None,
        vectorize: bool = True,
        weights: Sequence[float] | None = None,
    ) -> None:
        n = check_integer("n, the number of workers,", n, 1)
        mix_every = check_integer("mix_every", mix_every, 1)
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function of (model, *batch) that returns the loss, got {loss_fn!r}")
        max_norm = check_number(
            "grad_clip_norm", grad_clip_norm, "0.0 (no clipping) or a positive norm", at_least=0.0, below=2.0**128
        )
        self._overlap, self.vectorized = check_bool("overlap", overlap), check_bool("vectorize", vectorize)
        check_factories(optim_fn, lr_scheduler_fn)
        made = make_topology(
            topology, local_world_size=check_integer("local_world_size", local_world_size, 1), world_size=n, rank=0
        )
        self.topology = Topology.every(made, mix_every)  # of the class: a subclass may have an attribute of this name
        self._stack = Stack(model, n)
        if weights is not None:
            self._use_weights(weights)
        kind = check_compression(compression)
        narrow = any(param.itemsize < 4 for param in self._stack.params.values())
        self._faults = Faults(n)
        self._gradients = (VectorizedPass if vectorize else Loop)(self._stack, loss_fn or _cross_entropy)
        shares = [share_of(self.topology, i, range(n)) for i in range(n)]
        self._stepper = make_stepper(
            self._stack, optim_fn, lr_scheduler_fn, check_scaler(scaler), max_norm, self._faults, share=vectorize, shares=shares
        )
        rule = rule_for(check_rule(rule), self._stepper.optimizers)
        # Of the tracked momenta, if they are.
        self._momenta: list[SimulatedExchange] = []
        if isinstance(rule, MomentumTracking):
            momenta = self._stepper.track(rule.momentum)
            self._momenta = make_exchanges(momenta, self.topology, Gossip(), self._faults, for_momentum(kind))
        rule = fit_rule(rule, kind, self.topology, narrow=narrow, overlap=overlap)
        self._exchanges = make_exchanges(self._stack.params, self.topology, rule, self._faults, kind)
        self._failure: BaseException | None = None
        self.round = 0

    def _use_weights(self, weights: Sequence[float]) -> None:
        want = "a positive number of samples or tokens"
        found = [check_number(f"weight {i}", weight, want, above=0.0) for i, weight in enumerate(weights)]
        if len(found) != self.n:
            raise ValueError(f"weights must have a number for each of the {self.n} workers, got {len(found)}")
        if len(set(found)) > 1:
            self.topology = weigh(self.topology, found)
            self._stack.weights = torch.tensor(found, dtype=torch.float64, device="cpu")

    # -- training -----------------------------------------------------------------------------------------------------

    def step(self, *batch: Tensor) -> Tensor:
        """One update of every replica.

        Args:
            batch: the arguments of ``loss_fn`` after the model; of each tensor, (n, ...), row i is replica i's.

        Returns:
            The losses, (n,), detached; NaN for replicas that are away.

        Raises:
            TypeError, ValueError: a batch is no tensor or has another leading dimension than n; the loss is not one number, or
                does not depend on the model; a buffer was added or has changed its shape.
            RuntimeError: the model cannot be computed in one pass; or an earlier step failed after its gradients.

        If computing the losses and gradients raises, the step can be repeated: parameters and optimizers are unchanged, and
        buffers and the modules' Python attributes are restored (``Snapshot``; parameters that a forward writes to are not). An
        error after that, such as one of the optimizer, leaves some replicas updated and others not: the cluster takes no
        further steps then.
        """
        if self._failure is not None:
            raise RuntimeError(
                f"an earlier step failed half-way ({type(self._failure).__name__}: {self._failure}), so that some replicas "
                "have taken it and others not: make a new VirtualCluster"
            ) from self._failure
        self._check_batch(batch)
        with self._faults.standing_still(self._stack.values()):
            gradients = self._gradients(batch, self._stepper.scales())
        try:
            self._update(gradients)
        except BaseException as error:
            self._failure = error
            raise
        self.round += 1
        return self._faults.of_present(gradients.losses)

    def _update(self, gradients: Gradients) -> None:
        if self._overlap:
            for exchange in self._exchanges:
                exchange.finish_due(self.round)
        for tracking in self._stepper.tracked:
            tracking.follow_loads()
        self._stepper.step(gradients)
        if self._overlap:
            for exchange in self._momenta:
                exchange.finish_due(self.round)
        for exchange in (*self._exchanges, *self._momenta):
            exchange.start(self.round)
            if not self._overlap:
                exchange.finish()
        if self.round % FADE_EVERY == 0:
            for tracking in self._stepper.tracked:
                tracking.fade()

    def _check_batch(self, batch: Sequence[Any]) -> None:
        if not batch:
            raise TypeError("step() needs the batch: step(x, y), tensors whose first dimension is the number of workers")
        n = self._stack.n
        for place, tensor in enumerate(batch):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"tensor {place} of the batch must be a torch.Tensor, got {type(tensor).__name__}")
            if tensor.ndim == 0 or len(tensor) != n:
                raise ValueError(
                    f"tensor {place} of the batch has the shape {tuple(tensor.shape)}, but its first dimension must be the "
                    f"number of workers, {n}: stack one batch per worker"
                )

    def set_adaptive_factor(self, factor: float) -> None:
        """How far a mix goes, from 0 (none) to 1 (full).

        Raises:
            TypeError, ValueError: it is no number in [0, 1].
        """
        if to_float(factor) is None:
            raise TypeError(f"the adaptive factor must be a number in [0, 1], got {factor!r}")
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"the adaptive factor must be in [0, 1], got {factor!r}")
        for exchange in (*self._exchanges, *self._momenta):
            exchange.factor = float(factor)

    # -- faults -------------------------------------------------------------------------------------------------------

    def kill(self, which: RANKS_TYPE) -> None:
        """From the next step on these replicas take no part, as if their workers had died or were frozen.

        They stand still. Each of their edges is a hole: their partner sits that round out, and nobody else notices. What is in
        flight with them, and due before they are back, is dropped at both ends. They do not count in ``mean_model`` and
        ``consensus_distance``; the rows of a batch are still there for all, and those of the dead are not used.

        Args:
            which: a replica, or several.

        Raises:
            IndexError: there is no such replica.
            ValueError: the topology mixes groups, or no replica would be left.
        """
        check_pairs(self.topology, "VirtualCluster.kill")
        away = self._faults.away.union(self._faults.ranks(which))
        if len(away) == self.n:
            raise ValueError(f"kill would leave none of the {self.n} replicas: leave one at least")
        self._faults.away = away
        self._forget()

    def revive(self, which: RANKS_TYPE) -> None:
        """From the next step on these replicas take part again, as a worker that was frozen.

        Each goes on with its parameters, buffers and optimizer's averages as they were, and with the step count and the
        schedule of the others.

        Raises:
            IndexError: there is no such replica.
        """
        back = self._faults.away.intersection(self._faults.ranks(which))
        other = self._faults.present[0]
        for i in back:
            self._stepper.catch_up(i, other)
        self._faults.away = self._faults.away - back
        self._forget()

    def _forget(self) -> None:
        """Other replicas take part: what is in flight of the momenta is dropped, and own momenta start anew."""
        for exchange in self._momenta:
            exchange.drop()
        for tracking in self._stepper.tracked:
            tracking.forget()

    def cut(self, a: RANKS_TYPE, b: RANKS_TYPE) -> None:
        """From the next step on no replica of ``a`` and no replica of ``b`` reach each other; all train on.

        Their edges are holes, and what is in flight between them, and due before they are healed, is dropped.
        ``cut(range(8), range(8, 16))`` is a partition in halves, ``cut(3, 5)`` a broken link.

        Raises:
            IndexError: there is no such replica.
            ValueError: the topology mixes groups, or a replica is on both sides.
        """
        check_pairs(self.topology, "VirtualCluster.cut")
        self._faults.cut |= self._faults.pairs(a, b)

    def heal(self, a: RANKS_TYPE, b: RANKS_TYPE) -> None:
        """From the next step on the replicas of ``a`` and those of ``b`` reach each other again.

        Raises:
            IndexError: there is no such replica.
            ValueError: a replica is on both sides.
        """
        self._faults.cut -= self._faults.pairs(a, b)

    @property
    def alive(self) -> list[int]:
        """The replicas that take part."""
        return self._faults.present

    # -- state and results ------------------------------------------------------------------------------------------------

    @property
    def n(self) -> int:
        """The number of workers."""
        return self._stack.n

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The trainable parameters by name, (n, *shape): not copies, and may be changed in place between steps."""
        return {name: param.detach() for name, param in self._stack.params.items()}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers by name, (n, *shape): not copies."""
        return dict(self._stack.buffers)

    @property
    def optimizers(self) -> list[Optimizer]:
        """One for all replicas, or one per replica."""
        return list(self._stepper.optimizers)

    @property
    def lr_schedulers(self) -> list[LRScheduler]:
        """The schedulers of ``optimizers``; empty without a ``lr_scheduler_fn``."""
        return list(self._stepper.schedulers)

    @property
    def steps(self) -> list[int]:
        """Optimizer steps that each replica has taken; fewer than ``round`` where a scaler skipped one, no gradient came, or it
        was away."""
        return list(self._stepper.steps)

    @property
    def bytes_sent(self) -> int:
        """Bytes that all workers together would have sent so far, without headers.

        The workers of a pair send one message each; a group of m sends 2 (m - 1) in all, as its sums and means travel along
        trees.
        """
        return sum(exchange.bytes_sent for exchange in (*self._exchanges, *self._momenta))

    @property
    def rejected(self) -> int:
        """Blocks of parameters that were not mixed in a round, as replicas were too far apart for the compression."""
        return sum(exchange.rejected for exchange in (*self._exchanges, *self._momenta))

    def consensus_distance(self) -> float:
        """Root mean square over replicas of the L2 distance to their mean, over the trainable parameters.

        Over ``alive``, if some are away.
        """
        rows = self._faults.rows
        return float(self._stack.mean_of(self._stack.squared_distances(rows), rows).sqrt())

    def mean_model(self) -> nn.Module:
        """A new model with the mean of all floating-point parameters and buffers; other buffers are replica 0's.

        Over ``alive`` and of the first of them, if some are away. The rest of it is as it was when the cluster was made.
        """
        return self._stack.mean(self._faults.rows)

    def replica_model(self, i: int) -> nn.Module:
        """A new model with the values of replica i, 0 <= i < n; the rest of it is as it was when the cluster was made.

        Raises:
            IndexError: there is no such replica.
        """
        i = operator.index(i)
        if not 0 <= i < self.n:
            raise IndexError(f"replica {i} is out of range: the replicas are 0 to {self.n - 1}")
        return self._stack.replica(i)


def _cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)
