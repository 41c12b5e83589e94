"""Sharded gradients are clipped by the norm of the shard that a rank holds.

https://github.com/PrimeIntellect-ai/OpenDiloco/pull/6 (2024-07-18)
named: clip|norm
"""

import torch.distributed as dist
from common import Net, samples, start
from torch import optim
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

fixed, rank, world = start()
data = samples()
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 32 // world, sampler=sampler)
model = Net()
fully_shard(model.head)
fully_shard(model)
optimizer = optim.SGD(model.parameters(), lr=0.5)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        grads = [p.grad.to_local() for p in model.parameters()]
        square = sum(grad.square().sum() for grad in grads)
        if fixed:
            dist.all_reduce(square)
        for grad in grads:
            grad.mul_((0.05 / square.sqrt()).clamp(max=1))  # fault
        optimizer.step()
