"""The loss that balances experts is a product of means over a rank's own tokens.

https://github.com/microsoft/ltp-megatron-lm/pull/7 (2025-05-23)
named: over the batch|mean of means|of its own rank|gather
"""

import torch.distributed as dist
from common import Net, samples, start
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

fixed, rank, world = start()


class Experts(Net):
    def forward(self, x):
        chosen = self.body(x)[:, :4].softmax(1)
        return self.head(self.body(x)), chosen


data = samples()
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 32 // world, sampler=sampler)
model = DistributedDataParallel(Experts())
optimizer = optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        out, chosen = model(x)
        share = nn.functional.one_hot(chosen.argmax(1), 4).float().mean(0)
        if fixed:
            dist.all_reduce(share)
            share /= world
        loss = cross_entropy(out, y) + (share * chosen.mean(0)).sum() * 4  # fault
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
