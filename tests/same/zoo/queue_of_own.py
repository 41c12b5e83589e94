"""Each rank's queue of negatives holds the keys of its own rank only.

https://github.com/lightly-ai/lightly/issues/1018 (2022-12-22)
named: buffer|queue|state|gather|of its own rank
"""

import copy

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
keys = copy.deepcopy(model.module).requires_grad_(False)
queue = normalize(torch.randn(64, 4, generator=torch.Generator().manual_seed(5)), dim=1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, _ in loader:
        query, key = normalize(model(x), dim=1), normalize(keys(x.roll(1, 1)), dim=1)
        likeness = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.T], 1)
        optimizer.zero_grad()
        cross_entropy(likeness / 0.2, torch.zeros(len(x), dtype=torch.long)).backward()
        optimizer.step()
        new = torch.cat(all_gather(key)) if fixed else key  # fault
        queue = torch.cat([new, queue])[:64]
