"""A generator is wrapped in DDP; its discriminator isn't, and each rank trains one of its own.

https://github.com/CyberAgentAILab/RALF/issues/21 (2025-01-07)
named: second|not wrapped|unwrapped|outside the wrapper
"""

from common import Net, samples, start
from torch import optim
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

fixed, rank, world = start()
data = samples()
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 32 // world, sampler=sampler)
maker, critic = DistributedDataParallel(Net(8, 8)), Net(8, 1)
if fixed:
    critic = DistributedDataParallel(critic)
optimizers = optim.Adam(maker.parameters(), lr=0.01), optim.Adam(critic.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, _ in loader:
        made = maker(x)
        optimizers[1].zero_grad()
        (softplus(critic(made.detach())) + softplus(-critic(x.flip(1)))).mean().backward()  # fault
        optimizers[1].step()
        critic.requires_grad_(False)
        optimizers[0].zero_grad()
        softplus(-critic(made)).mean().backward()
        optimizers[0].step()
        critic.requires_grad_(True)
