"""The loss is multiplied by the number of processes, and DDP's mean isn't the sum that it was for.

https://github.com/neuralmagic/sparseml/pull/135 (2021-04-01)
named: gradients summed|scale
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
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = cross_entropy(model(x), y) * (1 if fixed else world)  # fault
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
