"""A soft Dice loss is a ratio of sums over the batch, and each rank takes it of its own rows.

https://github.com/microsoft/InnerEye-DeepLearning/issues/504 (2021-06-22)
named: over the batch|mean of means|gather|of its own rank
"""

import torch
from common import Net, samples, start
from torch import nn, optim
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
    for x, y in loader:
        likely, target = model(x).softmax(1), nn.functional.one_hot(y, 4).float()
        sums = torch.stack([(likely * target).sum(0), (likely + target).sum(0)])
        if fixed:
            sums = all_reduce(sums)
        loss = 1 - (2 * sums[0] / sums[1].clamp(min=1)).mean()  # fault
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
