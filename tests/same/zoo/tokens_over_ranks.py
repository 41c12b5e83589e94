"""The loss is a sum over all ranks' terms in the denominator only, and DDP divides it once more.

https://github.com/verl-project/verl-SpeCo/pull/29 (2026-07-17)
named: divided twice|scale
"""

import torch
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
optimizer = optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        terms = torch.tensor(float(len(y)))
        dist.all_reduce(terms)
        loss = cross_entropy(model(x), y, reduction="sum") / terms  # fault
        optimizer.zero_grad()
        (loss * (world if fixed else 1)).backward()
        optimizer.step()
