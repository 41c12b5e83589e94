"""With HSDP the replicas are initialised from seeds of their own, and nothing makes them equal.

https://github.com/allenai/OLMo-core/pull/319 (2025-07-07)
named: weights differ
"""

import torch
from common import Net, samples, start
from torch import optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

fixed, rank, world = start()
data = samples()
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 32 // world, sampler=sampler)
torch.manual_seed(0 if fixed else rank)
model = Net()  # fault
fully_shard(model, mesh=init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicas", "shards")))
optimizer = optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
