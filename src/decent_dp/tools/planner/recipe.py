"""What to take: the least predicted time to the loss that DDP reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .describe import DDP, DECENT_DP, FSDP, HSDP, Choice, Cluster, Job, Prediction
from .prediction import predict
from .ranking import left_out, same_rounds

__all__ = ["Recipe", "more_steps", "recipe"]

# With whole messages in every step, replicas need so many times DDP's steps to its loss. It grows by a part for each step
# between two mixes, and for each low-rank message that is missing to the length of a whole one: the more, the more rarely they
# are sent (the log, "time to the same loss": eight workers, characters). Of choices that need many more steps nothing is
# known.
_WHOLE, _PER_STEP, _PER_MESSAGE, _RARELY, _MOST = 1.135, 0.07, 0.026, 0.75, 2.5

# Tried in addition to whole messages, where those are waited for.
_TOPOLOGY, _CODE = "base-2", "int8"
_RANKS, _INTERVALS = (64, 32, 16, 8, 4, 2, 1), (1, 2, 4, 8, 16, 32)
# Low-rank messages of more numbers than this share of the parameters are no better than whole ones more rarely.
_MOST_NUMBERS = 0.5
# A step of GossipAdamW takes so many times one of torch's fused AdamW, at most: 2.8 to 3.2 were measured (make bench-optim).
_OPTIMIZER = 3.5
# What PyTorch's own are called in code.
_CALLS = {
    DDP: "model = torch.nn.parallel.DistributedDataParallel(model)",
    HSDP: "fully_shard(model, mesh=mesh)  # of two dimensions: the nodes, and the workers of each",
    FSDP: "fully_shard(model)",
}
# A mixing factor of 0, but for rounding.
_EXACT = 1e-6
# A step that waits less than this does not wait.
_LITTLE = 0.03


@dataclass(frozen=True)
class Recipe:
    """The choice with the least predicted time to DDP's loss.

    Attributes:
        prediction: of its steps, with GossipAdamW.
        steps: the number of its steps to that loss, in units of DDP's; estimated from measurements.
        to_ddp: its time to that loss, in units of DDP's.
    """

    prediction: Prediction
    steps: float
    to_ddp: float

    @property
    def code(self) -> str:
        """The call to copy; for PyTorch's own theirs."""
        choice = self.prediction.choice
        if not choice.decentralized:
            return _CALLS[choice.kind]
        given = {"topology": choice.topology_name, "compression": choice.compression, "mix_every": choice.mix_every}
        options = [f'{name}="{value}"' for name, value in given.items() if isinstance(value, str)]
        options += [f"mix_every={choice.mix_every}"] * (choice.mix_every > 1) + ['replica="node"'] * choice.of_nodes
        return f"replica = decent_dp.gossip(model, optimizer, {', '.join(options)})"


def more_steps(choice: Choice, job: Job) -> float:
    """The number of steps to DDP's loss in units of DDP's, by what is exchanged per step."""
    if not choice.decentralized:
        return 1.0
    h, messages = choice.steps_per_mix, 1.0 / choice.numbers_sent(job)
    return float(_WHOLE * (1 + _PER_STEP * (h - 1) + _PER_MESSAGE * (messages - 1) * h**_RARELY))


def recipe(cluster: Cluster, job: Job, predictions: Sequence[Prediction], *, seed: int = 0) -> Recipe:
    """Returns the choice with the least predicted time to DDP's loss.

    Args:
        cluster, job, seed: as of ``plan``.
        predictions: the result of ``plan``, with DDP among them. Low-rank messages and ``mix_every`` are tried in addition if
            all others wait for the network, as long as training needs at most 2.5 times DDP's steps.

    Raises:
        ValueError: DDP is not among the predictions.
    """
    ddp = next((found for found in predictions if found.choice.synchronous), None)
    if ddp is None:
        raise ValueError("recipe: predictions must contain one of DDP, which others are compared with")
    whole = [found for found in predictions if _is_measured(cluster, found)]
    if min(found.step_ms for found in whole) > (1 + _LITTLE) * job.compute_ms:
        whole += [predict(cluster, job, choice, seed=seed) for choice in _shorter(cluster, job)]

    optimizer_ms = (_OPTIMIZER - 1) * job.optimizer_ms

    def with_optimizer(found: Prediction) -> Prediction:
        if not found.choice.decentralized:
            return found
        return replace(found, step_ms=found.step_ms + optimizer_ms, compute_ms=found.compute_ms + optimizer_ms)

    def ms(found: Prediction) -> float:
        return found.step_ms * more_steps(found.choice, job)

    best = min(map(with_optimizer, whole), key=ms)
    return Recipe(best, more_steps(best.choice, job), ms(best) / ddp.step_ms)


def _is_measured(cluster: Cluster, found: Prediction) -> bool:
    """Whether ``more_steps`` holds for it: with one replica per node for the topology with which it was measured, with
    several for those that, as it does, average exactly in each period."""
    choice = found.choice
    if choice.decentralized and (cluster.local_world_size == 1 or choice.of_nodes):
        return choice.topology in (_TOPOLOGY, same_rounds(cluster).get(_TOPOLOGY))
    return choice.synchronous or (choice.decentralized and found.mixing is not None and found.mixing < _EXACT)


def _shorter(cluster: Cluster, job: Job) -> list[Choice]:
    if _TOPOLOGY in left_out(cluster):
        return []
    plain = Choice(DECENT_DP, _TOPOLOGY, _CODE, replica="node" if cluster.several_of_several else "worker")
    choices = [plain, *(replace(plain, compression=f"low-rank:{rank},{_CODE}") for rank in _RANKS)]
    useful = [choice for choice in choices if not choice.low_rank or choice.numbers_sent(job) <= _MOST_NUMBERS]
    found = [replace(choice, mix_every=h) for choice in useful for h in _INTERVALS]
    return [choice for choice in found if more_steps(choice, job) <= _MOST]
