"""The optimizer holds the parameters from before `fully_shard`, and trains nothing.

https://github.com/mosaicml/composer/pull/3822 (2025-04-16)
named: optimizer built before wrapping|no weight changes
"""

from common import Net, samples, start
from torch import optim
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

fixed, rank, world = start()
data = samples()
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 32 // world, sampler=sampler)
model = Net()
optimizer = optim.AdamW(model.parameters(), lr=0.01)  # fault
fully_shard(model)
if fixed:
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
