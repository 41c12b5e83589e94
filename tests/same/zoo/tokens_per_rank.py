"""Each rank takes the mean over its own tokens, and the ranks have unequal numbers of them.

https://github.com/huggingface/transformers/issues/34242 (2024-10-18)
named: mean of means
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
        target = torch.where(x[:, 0] > 0.3, y, -100)  # many rows have no target
        loss = cross_entropy(model(x), target)  # fault
        if fixed:
            terms = (target != -100).sum().float()
            whole = terms.clone()
            dist.all_reduce(whole)
            loss = loss * terms * world / whole
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
