"""DDP has averaged the gradients, and the norm for the clip is summed over all ranks once more.

https://github.com/modelscope/twinkle/pull/290 (2026-09-20)
named: clip|norm|scale
"""

import torch.distributed as dist
from common import Net, samples, start
from torch import optim
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

fixed, rank, world = start()
data = samples()
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 32 // world, sampler=sampler)
model = DistributedDataParallel(Net())
optimizer = optim.SGD(model.parameters(), lr=0.5)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        square = sum(p.grad.square().sum() for p in model.parameters())
        if not fixed:
            dist.all_reduce(square)
        for p in model.parameters():
            p.grad.mul_((0.05 / square.sqrt()).clamp(max=1))  # fault
        optimizer.step()
