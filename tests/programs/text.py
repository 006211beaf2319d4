"""A character model as it was written for decent_dp 0.2: accumulation, autocast, a profiler, a topology of its own."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from decent_dp.ddp import DecentralizedDataParallel, TopologyReg
from decent_dp.topo import Edge, Topology
from decent_dp.utils import initialize_dist

ACCUMULATE, UPDATES = 2, 12


@TopologyReg.register("all-then-pairs")
class AllThenPairs(Topology):
    def _get_topo_edges(self):
        n = self._world_size
        return [[Edge(ranks=list(range(n)), weight=1.0 / n)], [Edge(ranks=[i, i + 1], weight=0.75) for i in range(0, n, 2)]]


class Model(nn.Module):
    def __init__(self, tokens):
        super().__init__()
        self.embed = nn.Embedding(tokens, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, tokens, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.block(self.embed(x), src_mask=mask, is_causal=True))


def main():
    folder = sys.argv[1]
    rank, _ = initialize_dist()
    text = Path(__file__).read_text()
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(0)

    def optim_fn(params):
        return torch.optim.AdamW([param for _, param in params], lr=3e-3, weight_decay=0.01)

    scaler = torch.GradScaler("cpu", enabled=False)
    net = Model(len(letters))
    model = DecentralizedDataParallel(net, optim_fn, None, "all-then-pairs", scaler, bucket_size_in_mb=0)
    model.set_adaptive_factor(0.9)

    def traces(prof):
        prof.export_chrome_trace(os.path.join(folder, f"trace-{rank}-{prof.step_num}.json"))

    losses = []
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=2), on_trace_ready=traces
    ) as prof:
        for _ in range(UPDATES):
            model.train()
            total = 0.0
            for i in range(ACCUMULATE):
                model.set_accumulate_grad(i < ACCUMULATE - 1)
                starts = torch.randint(len(data) - 33, (16,), generator=generator)
                batch = torch.stack([data[start : start + 33] for start in starts])
                with record_function("forward"), torch.autocast("cpu", torch.bfloat16):
                    logits = model(batch[:, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()) / ACCUMULATE
                scaler.scale(loss).backward()
                total += loss.item()
            losses.append(total)
            prof.step()
    assert model._optims[0].param_groups[0]["lr"] == 3e-3
    updates = int(model._optims[0].state_dict()["state"][0]["step"])
    distance = model.global_avg(will_revert=True, return_d2c=True)
    assert distance >= 0
    mean = sum(param.double().sum().item() for param in model.parameters())
    model.revert_global_avg()
    model.revert_global_avg()
    dist.barrier()
    found = len([name for name in os.listdir(folder) if name.startswith(f"trace-{rank}")])
    print(json.dumps({"losses": losses, "mean": mean, "updates": updates, "traces": found}))


if __name__ == "__main__":
    main()
