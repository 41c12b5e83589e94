"""Nobody calls `set_epoch`, so every epoch has the same shuffled order.

https://github.com/pytorch/pytorch/issues/31771 (2020-01-02)
named: no set_epoch
"""

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
for epoch in range(3):
    if fixed:
        sampler.set_epoch(epoch)
    for x, y in loader:  # fault
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
