"""Each rank computes the whole loss on gathered features, and DDP's mean makes gradients half as large.

https://github.com/JohnGiorgi/DeCLUTR/pull/212 (2021-05-08)
named: divided twice|without gradient|scale
"""

import torch
import torch.distributed as dist
from common import Net, samples, start
from torch import optim
from torch.nn.functional import mse_loss, normalize
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
        own = model(x)
        parts, classes = ([torch.zeros_like(t) for _ in range(world)] for t in (own, y))
        dist.all_gather(parts, own.detach())
        dist.all_gather(classes, y)
        parts[rank] = own
        whole, target = normalize(torch.cat(parts), dim=1), torch.cat(classes)
        loss = mse_loss(whole @ whole.T, (target[:, None] == target).float())  # fault
        optimizer.zero_grad()
        (loss * (world if fixed else 1)).backward()
        optimizer.step()
