"""Each rank clips its own gradients, and the mean is taken of what is left of them.

https://github.com/mindspore-lab/mindcv/issues/603 (2023-04-12)
named: clip|is no mean|norm
"""

import torch.distributed as dist
from common import Net, samples, start
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

fixed, rank, world = start()
data = samples()
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 32 // world, sampler=sampler)
model = Net()
optimizer = optim.SGD(model.parameters(), lr=0.5)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if not fixed:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # fault
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
