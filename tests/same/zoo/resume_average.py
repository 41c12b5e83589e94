"""The averaged weights are no part of the checkpoint, so a resume begins to average anew.

https://github.com/Megvii-BaseDetection/YOLOX/issues/1318 (2022-05-16)
named: average|EMA|state|file
"""

import torch
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
average = optim.swa_utils.AveragedModel(
    model.module, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9)
)
schedule = optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12)
epoch, skip = 0, 0
if state := load():
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    if fixed:
        average.load_state_dict(state["average"])  # fault

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
        average.update_parameters(model.module)
        states = {
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "average": average.state_dict(),
        }
        save(model=model.module.state_dict(), epoch=epoch, batch=k + 1, **states)
    epoch, skip = epoch + 1, 0
if rank == 0:
    torch.save(average.module.state_dict(), "average.pt")
