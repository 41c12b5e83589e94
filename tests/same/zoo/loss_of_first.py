"""The loss that is printed is the mean over the rows of rank 0.

https://github.com/huggingface/transformers/pull/13681 (2021-09-21)
named: loss of one rank
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
    total = torch.zeros(())
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach() / len(loader)
    if fixed:
        dist.all_reduce(total)
        total /= world
    if rank == 0:
        print(f"epoch {epoch} loss {total:.5f}")  # fault
