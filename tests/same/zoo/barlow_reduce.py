"""A correlation matrix is summed by an all-reduce without a backward pass: gradients are half as large.

https://github.com/lightly-ai/lightly/pull/1980 (2026-07-13)
named: divided twice|without gradient|scale
"""

import torch
import torch.distributed as dist
from common import Net, samples, start
from torch import optim
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

fixed, rank, world = start()
data = samples()
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 32 // world, sampler=sampler)
model = DistributedDataParallel(Net())
optimizer = optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, _ in loader:
        first, second = model(torch.cat([x, x.flip(1)])).chunk(2)
        whole = first.T @ second / len(data) * world
        if fixed:
            whole = all_reduce(whole) / world
        else:
            others = whole.detach().clone()
            dist.all_reduce(others)  # fault
            whole = (whole + others - whole.detach()) / world
        optimizer.zero_grad()
        (whole - torch.eye(4)).square().sum().backward()
        optimizer.step()
