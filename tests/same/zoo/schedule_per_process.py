"""The schedule takes a step for each process, so the learning rate falls twice as fast.

https://github.com/huggingface/diffusers/issues/3954 (2023-07-05)
named: once per process|learning rate
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
schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        for _ in range(1 if fixed else world):
            schedule.step()  # fault
