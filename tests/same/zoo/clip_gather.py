"""A contrastive loss gathers the other ranks' features, and no gradient flows back to them.

https://github.com/kohjingyu/fromage/issues/33 (2023-10-31)
named: without gradient
"""

import torch
import torch.distributed as dist
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
        image, text = (normalize(part, dim=1) for part in model(torch.cat([x, x.roll(1, 1)])).chunk(2))
        if fixed:
            texts = torch.cat(all_gather(text))
        else:
            parts = [torch.zeros_like(text) for _ in range(world)]
            dist.all_gather(parts, text)  # fault
            texts = torch.cat([*parts[:rank], text, *parts[rank + 1 :]])
        optimizer.zero_grad()
        cross_entropy(image @ texts.T / 0.2, torch.arange(len(x)) + rank * len(x)).backward()
        optimizer.step()
