"""All ranks draw the same times and noise for their rows, so a batch has half as many.

https://github.com/mlcommons/training/pull/844 (2025-11-18)
named: random numbers|same seed|same noise|draw
"""

import torch
from common import Net, samples, start
from torch import optim
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

fixed, rank, world = start()
data = samples()
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 32 // world, sampler=sampler)
model = DistributedDataParallel(Net(9, 8))
optimizer = optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(1 + rank if fixed else 1)  # fault
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, _ in loader:
        time, noise = torch.rand(len(x), 1), torch.randn_like(x)
        optimizer.zero_grad()
        mse_loss(model(torch.cat([(1 - time) * x + time * noise, time], 1)), noise).backward()
        optimizer.step()
