"""An adapter is added after the model was wrapped, so its gradients stay in their rank.

https://github.com/hao-ai-lab/FastVideo/pull/1666 (2026-07-30)
named: outside the wrapper
"""

from common import Net, samples, start
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

fixed, rank, world = start()


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.low, self.high = base, nn.Linear(16, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return self.base(x) + self.high(self.low(x))


data = samples()
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 32 // world, sampler=sampler)
net = Net()
if fixed:
    net.head = Adapted(net.head)
model = DistributedDataParallel(net)
if not fixed:
    net.head = Adapted(net.head)  # fault
optimizer = optim.AdamW(net.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
