"""Train on several devices with DistributedDataParallel, one process per device, in plain PyTorch.

One machine:     torchrun --standalone --nproc-per-node=2 train_ddp.py  (1 instead of 2 to debug)
Several nodes:   sbatch train.sbatch
The same command resumes from the checkpoint, and all of them print the losses of train_single.py."""

import faulthandler
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split

EPOCHS, BATCH, WORKERS = 5, 64, 0  # batch: of all processes together; workers: per process
CHECKPOINT = Path(sys.argv[1] if sys.argv[1:] else "train_ddp.pt")  # on a disk that all nodes share


def make_dataset():  # yours: one dataset to train on, one to validate with, the same in every process
    digits = np.load(Path(__file__).with_name("digits.npz"))
    images, labels = torch.tensor(digits["images"]) / 16, torch.tensor(digits["labels"]).long()
    dataset = TensorDataset(images[:, None], labels)  # 1,797 images (1, 8, 8), from 0 to 1
    return random_split(dataset, [1536, 261], torch.Generator().manual_seed(0))


def make_model():  # yours: any nn.Module
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10))


def main():
    faulthandler.register(signal.SIGUSR2)  # kill -USR2 PID: the rank prints where it is
    cuda = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    rank, world = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world} on {device}\n", end="", flush=True)  # look here first in every log
    assert BATCH % world == 0, f"a batch of {BATCH} cannot be divided by {world} processes"
    torch.manual_seed(rank)  # dropout differs in each process; DDP copies rank 0's weights to all
    train, check = make_dataset()
    part = Subset(check, range(rank, len(check), world))  # each image is validated once, by one rank
    model = DistributedDataParallel(make_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(train, drop_last=True)  # shuffles; each rank gets its share
    options = {"drop_last": True, "num_workers": WORKERS, "pin_memory": cuda}
    loader = DataLoader(train, BATCH // world, sampler=sampler, **options)
    state = {"epoch": 0}
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, map_location="cpu")  # on the GPU it would stay there, unused
        model.module.load_state_dict(state["model"])  # .module: the model inside the wrapper
        optimizer.load_state_dict(state["optimizer"])
    for epoch in range(state["epoch"], EPOCHS):
        model.train()
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        totals = torch.zeros(2, device=device)  # of this rank: sum of losses, correct predictions
        for images, labels in loader:
            outputs = model(images.to(device, non_blocking=True))
            loss = cross_entropy(outputs, labels.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()  # DDP averages the gradients of all ranks while this runs
            optimizer.step()
            totals[0] += loss.detach()
        model.eval()
        for buffer in model.buffers():  # batch norm: validate with the statistics that rank 0 saves
            dist.broadcast(buffer, 0)
        with torch.no_grad():  # model.module: the ranks may have different numbers of batches here
            for images, labels in DataLoader(part, BATCH):
                totals[1] += (model.module(images.to(device)).argmax(1) == labels.to(device)).sum()
        dist.all_reduce(totals)  # every rank makes this call; one prints and saves
        if rank == 0:
            mean, accuracy = totals[0] / world / len(loader), totals[1] / len(check)
            print(f"epoch {epoch + 1}: loss {mean:.6f}, accuracy {accuracy:.4f}", flush=True)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"epoch": epoch + 1}, f"{CHECKPOINT}.tmp")
            os.replace(f"{CHECKPOINT}.tmp", CHECKPOINT)  # if we are killed here, the old file is whole
    dist.barrier()  # no rank leaves while rank 0 still writes
    dist.destroy_process_group()


if __name__ == "__main__":  # the loader's workers may import this file again
    main()
