"""Frozen layers are unfrozen in the second epoch; DDP, built before, never averages them.

https://github.com/facebookresearch/detectron2/issues/2486 (2021-01-14)
named: outside the wrapper|unfro
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
net = Net()
net.body.requires_grad_(False)
model = DistributedDataParallel(net)
optimizer = optim.AdamW(net.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    if epoch == 1:
        net.body.requires_grad_(True)  # fault
        if fixed:
            model = DistributedDataParallel(net)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
