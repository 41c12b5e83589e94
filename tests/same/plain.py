"""A right script in functions: DDP, accumulation, a validation, a log, a schedule, a checkpoint in each epoch."""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()
stopped = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.norm(self.inside(x)).relu())


def data():
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(128, 8, generator=chance)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    return random_split(TensorDataset(x, y), [112, 16], generator=torch.Generator().manual_seed(1))


def mean(value):
    dist.all_reduce(value)
    return value / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    train, check = data()
    sampler = DistributedSampler(train, drop_last=True)
    part = args.batch_size // world // args.accumulate
    loader = DataLoader(train, part, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    first, skip = 1, 0
    if os.path.exists("last.pt"):
        state = torch.load("last.pt")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first, skip = state["epoch"], state["batch"]
        torch.set_rng_state(state["chance"])
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    for epoch in range(first, args.epochs + 1):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for k, (x, y) in enumerate(loader, 1):
            if k <= skip:
                continue
            last = k % args.accumulate == 0
            model.require_backward_grad_sync = last
            loss = nn.functional.cross_entropy(model(x), y) / args.accumulate
            loss.backward()
            total += loss.detach() * args.accumulate / len(loader)
            if last:
                optimizer.step()
                optimizer.zero_grad()
            if stopped:
                save(model, optimizer, schedule, epoch, k)
                return
        schedule.step()
        shown = mean(total)
        if rank == 0 and not skip:
            print(f"epoch {epoch} loss {shown:.6f}")
        skip = 0
        with torch.no_grad():
            for x, _ in DataLoader(check, 16):
                model.module(x)
        save(model, optimizer, schedule, epoch + 1, 0)
    dist.barrier()
    dist.destroy_process_group()


def save(model, optimizer, schedule, epoch, batch):
    if dist.get_rank() == 0:
        state = dict(
            model=model.module.state_dict(), optimizer=optimizer.state_dict(), epoch=epoch, batch=batch
        )
        state |= dict(schedule=schedule.state_dict(), chance=torch.get_rng_state())
        torch.save(state, "last.tmp")
        os.replace("last.tmp", "last.pt")
    dist.barrier()


if __name__ == "__main__":
    main()
