"""Replicas of several workers each: FSDP2 inside, gossip outside. On CPUs, two replicas of two workers:

    torchrun --standalone --nproc-per-node 4 examples/sharded.py

docs/nodes.md explains it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import decent_dp
from decent_dp.checkpoint import export

rank, world_size = decent_dp.initialize_dist()
shards = 2 if world_size % 2 == 0 else 1  # workers per replica: those of a node
device = "cuda" if torch.cuda.is_available() else "cpu"
sizes, names = (world_size // shards, shards), ("replica", "shard")
mesh = init_device_mesh(device, sizes, mesh_dim_names=names)  # 1

torch.manual_seed(0)
layers = [
    nn.Sequential(nn.Linear(16, 64), nn.Tanh()),
    nn.Sequential(nn.Linear(64, 64), nn.Tanh()),
    nn.Linear(64, 1),
]
model = nn.Sequential(*layers).to(device)
for layer in model:
    fully_shard(layer, mesh=mesh["shard"])  # 2: over the inner dimension alone
fully_shard(model, mesh=mesh["shard"])

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
replica = decent_dp.gossip(model, optimizer)  # 3: mixes over the outer dimension

torch.manual_seed(rank)  # each worker draws its own data
for _ in range(60):
    x = torch.randn(64, 16, device=device)
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # over all shards
    optimizer.step()

with replica.averaged(), torch.no_grad():  # 4: on all workers
    x = torch.randn(1000, 16, device=device)
    error = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
export(replica, "model.pt")  # 5: the whole mean model, one plain file
if rank == 0:
    print(f"{world_size // shards} replicas of {shards} workers, error {error:.2f}")
replica.close()
torch.distributed.destroy_process_group()
