"""The mesh that shards the model has lost its dimension of replicas, so they are never averaged.

https://github.com/NVIDIA-NeMo/Automodel/pull/3135 (2026-07-20)
named: mesh without reduction
"""

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
mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicas", "shards"))
model = Net()
fully_shard(model, mesh=mesh if fixed else mesh["shards"])  # fault
optimizer = optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
