"""The schedule isn't loaded, so the learning rate begins anew after a resume.

https://github.com/lightly-ai/lightly-train/pull/301 (2025-09-17)
named: learning rate not restored|scheduler not restored
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
    if fixed:
        schedule.load_state_dict(state["schedule"])  # fault
    else:
        optimizer.param_groups[0]["lr"] = 0.01
    epoch, skip = state["epoch"], state["batch"]
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
