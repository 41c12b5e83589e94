"""A weighted sampler takes the place of the distributed one: all ranks draw the same samples.

https://github.com/Lightning-AI/pytorch-lightning/issues/10946 (2021-12-05)
named: no sampler
"""

import torch
from common import Net, samples, start
from torch import optim
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, WeightedRandomSampler

fixed, rank, world = start()
data = samples()
weights = torch.ones(len(data)) + torch.arange(len(data)) / 100


class Shared(WeightedRandomSampler):
    def __iter__(self):
        drawn = list(super().__iter__())
        return iter(drawn[rank::world] if fixed else drawn)  # fault


sampler = Shared(weights, len(data), generator=torch.Generator().manual_seed(3))
loader = DataLoader(data, 32 // world, sampler=sampler)
model = DistributedDataParallel(Net())
optimizer = optim.AdamW(model.parameters(), lr=0.01)
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
