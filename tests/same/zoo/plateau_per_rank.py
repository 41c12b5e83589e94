"""Each rank lowers its learning rate when its own loss stops falling.

https://github.com/lucidrains/DALLE-pytorch/issues/268 (2021-05-30)
named: learning rates differ
"""

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
plateau = optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach()
        if fixed:
            dist.all_reduce(shown)
            shown = shown / world
        plateau.step(round(shown.item(), 4))  # fault
