"""The last batches of an epoch make a short step, and its last part stays inside `no_sync`.

https://github.com/huggingface/accelerate/issues/2831 (2024-06-06)
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
data = samples(96)
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 16 // world, sampler=sampler)  # six batches
model = DistributedDataParallel(Net())
optimizer = optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for k, (x, y) in enumerate(loader, 1):
        step = k % parts == 0 or k == len(loader)
        synced = step if fixed else k % parts == 0
        with contextlib.nullcontext() if synced else model.no_sync():  # fault
            (cross_entropy(model(x), y) / parts).backward()
        if step:
            optimizer.step()
            optimizer.zero_grad()
