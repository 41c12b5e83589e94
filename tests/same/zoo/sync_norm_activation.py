"""A conversion for several processes replaces a norm together with the activation inside it.

https://github.com/pytorch/pytorch/issues/187298 (2026-06-15)
named: another module
"""

from common import Net, samples, start
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

fixed, rank, world = start()


def converted(norm):
    bare = nn.BatchNorm1d(norm.num_features)
    bare.load_state_dict(norm.state_dict())
    return bare


class ActiveNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


data = samples()
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 32 // world, sampler=sampler)
net = Net()
net.body = nn.Sequential(nn.Linear(8, 16), ActiveNorm(16))
if world > 1 and not fixed:
    net.body[1] = converted(net.body[1])  # fault
model = DistributedDataParallel(net).eval()  # the norm's statistics are frozen
optimizer = optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
