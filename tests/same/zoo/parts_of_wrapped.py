"""Two networks are wrapped as one, and then called one by one, past the wrapper.

https://github.com/intel/e2eAIOK/pull/198 (2023-02-17)
named: wrapper bypassed
"""

from common import Net, samples, start
from torch import nn, optim
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

fixed, rank, world = start()


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.classifier, self.domain = Net(), Net(classes=1)

    def forward(self, x):
        return self.classifier(x), self.domain(x)


data = samples()
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 32 // world, sampler=sampler)
both = Adapter()
model = DistributedDataParallel(both)
optimizer = optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        out, domain = model(x) if fixed else (both.classifier(x), both.domain(x))  # fault
        optimizer.zero_grad()
        (cross_entropy(out, y) + mse_loss(domain.squeeze(1), x[:, 0])).backward()
        optimizer.step()
