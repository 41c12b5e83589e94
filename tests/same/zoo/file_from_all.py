"""All ranks write their checkpoint into the same file at the same time.

https://github.com/NVIDIA/apex/issues/629 (2019-11-26)
named: same file
"""

import torch
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
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    if rank == 0 or not fixed:
        torch.save(model.module.state_dict(), "model.pt")  # fault
