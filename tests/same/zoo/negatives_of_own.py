"""A contrastive loss knows the rows of its own rank only, so half of the negatives are missing.

https://github.com/vturrisi/solo-learn/issues/229 (2022-03-06)
named: gather|over the batch|of its own rank|mean of means
"""

import torch
from common import Net, samples, start
from torch import optim
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, normalize
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
        first, second = (normalize(part, dim=1) for part in model(torch.cat([x, x.roll(1, 1)])).chunk(2))
        others = torch.cat(all_gather(second)) if fixed else second  # fault
        place = rank * len(x) if fixed else 0
        optimizer.zero_grad()
        cross_entropy(first @ others.T / 0.2, torch.arange(len(x)) + place).backward()
        optimizer.step()
