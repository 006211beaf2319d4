"""The trainer on docs/torchtitan.md: equal to whole replicas, resumed exactly, without collectives of all in its steps."""

from __future__ import annotations

import copy
import sys
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import decent_dp
from decent_dp.checkpoint import export
from decent_dp.transport import run_replicas
from tests.framework_cases import collectives
from tests.sharded_cases import needs_shards, values
from tests.test_docs import ROOT, blocks

pytestmark = [needs_shards, pytest.mark.slow]

# GossipAdamW's means of columns are those of a shard; AdamW's steps are equal to rounding.
EXACT = ("decent_dp.GossipAdamW, torch.optim.AdamW", "torch.optim.AdamW, torch.optim.AdamW")

# Steps between two saves.
INTERVAL = 6


def script() -> dict[str, Any]:
    (block,) = blocks(ROOT / "docs" / "torchtitan.md", "python")
    assert EXACT[0] in block.code
    # The compiler imports the module of what it compiles.
    sys.modules["titan"] = ModuleType("titan")
    names = vars(sys.modules["titan"])
    exec(compile(block.code.replace(*EXACT), "docs/torchtitan.md", "exec", dont_inherit=True), names)
    return names


def end(replica: Any) -> dict[str, dict[str, Tensor]]:
    own = values(replica.model)
    with replica.averaged():
        mean = values(replica.model)
    return {"own": own, "mean": mean}


def sharded(rank: int, n: int, folder: str, compiled: bool) -> dict[str, Any]:
    if compiled:
        warnings.simplefilter("ignore")  # the compiler's
    names, found = script(), {}

    def train(name: str, **options: Any) -> Any:
        config = names["Config"](checkpoint=f"{folder}/{name}", compile=compiled, **options)
        return names["train"](config)

    replica = train("whole", steps=12, interval=INTERVAL)
    found["whole"] = end(replica)
    found["rounds"] = replica.stats().rounds
    export(replica, f"{folder}/model.pt")
    replica.close()
    if not compiled:
        for steps in (6, 12):
            replica = train("resumed", steps=steps, interval=INTERVAL)
            found["resumed"] = end(replica)
            replica.close()
        counts = []
        for steps in (2, 8):
            with collectives() as calls:
                train(f"counted{steps}", steps=steps, interval=100).close()
            counts.append(len(calls))
        found["collectives"] = counts
    return found


def plain(transport: Any, names: dict[str, Any], start: nn.Module, shards: int) -> dict[str, Any]:
    """Without shards, recomputed activations and a compiler: each replica sees the batches of its workers one by one."""
    config, model = names["Config"](steps=12), copy.deepcopy(start)
    optimizers = names["make_optimizers"](model, config)
    replica = decent_dp.gossip(model, optimizers, transport=transport)
    for step in range(config.steps):
        for worker in range(shards):
            batch = names["get_batch"](step, shards * transport.rank + worker, config)
            (names["get_loss"](model, batch, "cpu") / (shards * config.batch * config.length)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = config.rate * min(1.0, (step + 1) / config.warmup)
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % INTERVAL == 0:
            replica.flush()  # as a save does
    found = end(replica)
    replica.close()
    return found


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("compiled", [False, True])
def test_two_replicas_of_two_workers_equal_whole_replicas(workers, tmp_path, compiled):
    found = workers(4, sharded, str(tmp_path), compiled, timeout=900)
    names = script()
    torch.manual_seed(0)
    start = names["Transformer"](names["Config"]())
    wanted = run_replicas(2, partial(plain, names=names, start=start, shards=2))
    assert any(not torch.equal(a, b) for a, b in zip(wanted[0]["own"].values(), wanted[1]["own"].values(), strict=True))
    for rank, worker in enumerate(found):
        assert worker["rounds"] == 12
        for kind, tensors in wanted[rank // 2].items():
            assert worker["whole"][kind].keys() == tensors.keys()
            for name, value in tensors.items():
                torch.testing.assert_close(
                    worker["whole"][kind][name],
                    value,
                    rtol=2e-5,
                    atol=2e-6,
                    msg=lambda m, at=f"{rank} {kind} {name}": f"{at}: {m}",
                )
        if not compiled:
            for kind, tensors in worker["whole"].items():
                assert {name for name, value in tensors.items() if not value.equal(worker["resumed"][kind][name])} == set()
            few, many = worker["collectives"]
            assert few == many  # those of the construction
    exported = torch.load(Path(tmp_path, "model.pt"), weights_only=True)
    start.load_state_dict(exported)
    for name, value in found[0]["whole"]["mean"].items():
        torch.testing.assert_close(exported[name], value, rtol=1e-6, atol=1e-7)
