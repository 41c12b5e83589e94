"""Advantages are normalised by mean and deviation of a rank's own rows.

https://github.com/HorizonRobotics/alf/pull/1642 (2024-05-07)
named: over the batch|mean of means|of its own rank|gather
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
        reward = x[:, 0] * y
        sums = torch.stack([reward.sum(), reward.square().sum(), torch.tensor(float(len(x)))])
        if fixed:
            dist.all_reduce(sums)
        mean = sums[0] / sums[2]
        advantage = (reward - mean) / (sums[1] / sums[2] - mean**2).sqrt()  # fault
        optimizer.zero_grad()
        (advantage * cross_entropy(model(x), y, reduction="none")).mean().backward()
        optimizer.step()
