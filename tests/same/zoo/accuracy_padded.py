"""The sampler fills up the validation data with samples that then count twice in the accuracy.

https://github.com/pytorch/pytorch/issues/25162 (2019-08-25)
named: print|padd|twice|metric
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
check = samples(17)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        share = (
            list(range(rank, len(check), world))
            if fixed
            else list(DistributedSampler(check, shuffle=False))
        )
        rows = [check[k] for k in share]  # fault
        right = [(model.module(x[None]).argmax(1) == y).float() for x, y in rows]
        sums = torch.tensor([float(sum(right)), float(len(right))])
        dist.all_reduce(sums)
    if rank == 0:
        print(f"accuracy: {sums[0] / sums[1]:.5f}")
