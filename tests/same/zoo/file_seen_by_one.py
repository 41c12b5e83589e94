"""One rank sees the checkpoint's file and calls a broadcast; the other doesn't, and goes on.

https://github.com/KempnerInstitute/KempnerForge/issues/49 (2026-04-22)
named: hangs|same collectives|collective
"""

import torch.distributed as dist
from common import Net, samples, start
from torch import optim
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

fixed, rank, world = start()
data = samples()
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 32 // world, sampler=sampler)
seen = [rank == 0]  # a network file system shows the new file to rank 1 later
if fixed:
    dist.broadcast_object_list(seen, src=0)
net = Net()
if seen[0]:
    state = [net.state_dict()]
    dist.broadcast_object_list(state, src=0)  # fault
    net.load_state_dict(state[0])
model = DistributedDataParallel(net)
optimizer = optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
