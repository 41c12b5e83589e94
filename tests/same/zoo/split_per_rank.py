"""Each rank has a seed of its own, so each splits training and validation data in another way.

https://github.com/TensorAuto/OpenTau/pull/498 (2026-08-04)
named: another order per rank|trained and validated|no sampler
"""

import torch
from common import Net, samples, start
from torch import optim
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, random_split

fixed, rank, world = start()
torch.manual_seed(1 if fixed else 1 + rank)
train, check = random_split(samples(), [160, 32])  # fault
sampler = DistributedSampler(train)
loader = DataLoader(train, 32 // world, sampler=sampler, drop_last=True)
model = DistributedDataParallel(Net())
optimizer = optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        for x, _ in DataLoader(check, 32):
            model.module(x)
