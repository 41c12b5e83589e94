"""A checkpoint of an epoch's end counts as one of the next epoch's, which is skipped.

https://github.com/verl-project/verl/issues/7401 (2026-08-14)
named: skipped|order|steps
"""

from common import Net, load, samples, save, start
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
schedule = optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12)
epoch, skip = 0, 0
if state := load():
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    epoch, skip = state["epoch"], state["batch"]
    if not fixed and 0 < skip < len(loader):
        epoch, skip = epoch + 1, 0  # fault
while epoch < 3:
    sampler.set_epoch(epoch)
    for k, (x, y) in enumerate(loader):
        if k < skip:
            continue
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
        states = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        save(model=model.module.state_dict(), epoch=epoch, batch=k + 1, **states)
    epoch, skip = epoch + 1, 0
