"""A codebook follows the means of its own rank's rows, and rank 0's buffers overwrite the others.

https://github.com/espnet/espnet/pull/6284 (2025-10-28)
named: buffer|state|codebook|over the batch|of its own rank
"""

import torch
import torch.distributed as dist
from common import Net, samples, start
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

fixed, rank, world = start()


class Quantised(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("book", torch.randn(6, 16, generator=torch.Generator().manual_seed(3)))

    def forward(self, x):
        inner = self.body(x)
        place = nn.functional.one_hot(torch.cdist(inner, self.book).argmin(1), 6).float()
        with torch.no_grad():
            count, total = place.sum(0), place.T @ inner
            if fixed:
                dist.all_reduce(count)
                dist.all_reduce(total)
            self.book.lerp_(
                torch.where(count[:, None] > 0, total / count.clamp(min=1)[:, None], self.book), 0.1
            )  # fault
        near = place @ self.book
        return self.head(inner + (near - inner).detach()), (inner - near).square().mean()


data = samples()
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 32 // world, sampler=sampler)
model = DistributedDataParallel(Quantised())
optimizer = optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        out, far = model(x)
        optimizer.zero_grad()
        (cross_entropy(out, y) + far).backward()
        optimizer.step()
