"""All ranks have the same seed, so rows in the same place of all ranks lose the same features.

https://github.com/huggingface/transformers/issues/31412 (2024-06-14)
named: random numbers|same seed|same mask|draw
"""

import torch
from common import Net, samples, start
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

fixed, rank, world = start()
data = samples()
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 32 // world, sampler=sampler)
net = Net()
net.body.append(nn.Dropout(0.5))
model = DistributedDataParallel(net)
optimizer = optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(1 + rank if fixed else 1)  # fault
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
