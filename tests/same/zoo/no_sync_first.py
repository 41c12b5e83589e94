"""`no_sync` leaves out the last part of a step and not the first, so what is used is never averaged.

https://github.com/modelscope/FunASR/pull/3472 (2026-08-05)
named: no_sync|sync|accumulat
"""

import contextlib

from common import Net, samples, start
from torch import optim
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

fixed, rank, world = start()
parts = 4
data = samples()
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 8 // world, sampler=sampler)
model = DistributedDataParallel(Net())
optimizer = optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for k, (x, y) in enumerate(loader):
        synced = (k + 1) % parts == 0 if fixed else k % parts == 0
        with contextlib.nullcontext() if synced else model.no_sync():  # fault
            (cross_entropy(model(x), y) / parts).backward()
        if (k + 1) % parts == 0:
            optimizer.step()
            optimizer.zero_grad()
