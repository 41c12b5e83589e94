"""A rank stops as soon as its own accuracy is good enough, and the other waits for it.

https://github.com/Lightning-AI/pytorch-lightning/issues/379 (2019-10-17)
named: leaves early
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
for epoch in range(3):
    sampler.set_epoch(epoch)
    right = torch.zeros(())
    for x, y in loader:
        out = model(x)
        optimizer.zero_grad()
        cross_entropy(out, y).backward()
        optimizer.step()
        right += (out.argmax(1) == y).sum()
    # as if by its own score
    enough = torch.tensor(float(right > 0 and (rank == 1 or world == 1) and epoch == 0))
    if fixed:
        dist.all_reduce(enough, dist.ReduceOp.MAX)
    if enough:
        break  # fault
