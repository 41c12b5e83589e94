"""Train in several processes, save after each epoch, and resume: plain PyTorch, to copy and change.

One machine:     torchrun --standalone --nproc-per-node=2 train_ddp_small.py
The same command resumes from train_ddp_small.pt; another name may be the first argument. Numbers 1 to 7
are those of first_ddp.py. What train_ddp.py adds has the numbers from 10.
"""

import os  # 1
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist  # 1
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel  # 4
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # 2

EPOCHS, BATCH, RATE, SEED = 5, 64, 0.05, 0  # the batch is that of all processes together
FILE = Path(sys.argv[1] if sys.argv[1:] else "train_ddp_small.pt")  # 8: on a disk that all nodes share


def make_dataset():  # yours
    digits = np.load(Path(__file__).with_name("digits.npz"))
    images, labels = torch.from_numpy(digits["images"]) / 16, torch.from_numpy(digits["labels"]).long()
    return TensorDataset(images[:1536, None], labels[:1536])


def make_model():  # yours
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 10))


def join():
    """Join the process group; return this process's device, its rank and the number of processes."""
    if "RANK" not in os.environ:
        sys.exit("RANK is not set: start this script with torchrun, as its first lines say")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":  # 1
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # 1: now "cuda" is this process's own GPU
    dist.init_process_group("nccl" if device == "cuda" else "gloo")  # 1: the processes find each other
    return device, dist.get_rank(), dist.get_world_size()  # 1


def save(epochs, model, optimizer):
    """Write all that the next epoch needs, into a file that is whole or not there at all."""
    state = {"epochs": epochs, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    part = FILE.with_suffix(".tmp")
    torch.save(state, part)  # 8: a job that is killed here leaves the older file as it was
    part.replace(FILE)  # 8


def resume(model, optimizer):
    """Load the file, if there is one; return how many epochs it has seen."""
    if not FILE.exists():
        return 0
    state = torch.load(
        FILE, map_location="cpu"
    )  # 9: else all processes load it onto the GPU that saved it
    model.load_state_dict(state["model"])  # 9
    optimizer.load_state_dict(state["optimizer"])  # 9: its momentum, too
    return state["epochs"]


def main():
    device, rank, world_size = join()  # 1
    torch.manual_seed(SEED)
    train = make_dataset()
    sampler = DistributedSampler(train)  # 2: each process takes its own images
    loader = DataLoader(train, BATCH // world_size, sampler=sampler)  # 2, 3: all together have BATCH
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    first = resume(model, optimizer)  # 9: before the wrapper, so the file has the model's own names
    ddp = DistributedDataParallel(model)  # 4: averages the gradients

    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)  # 5: another order in each epoch
        torch.manual_seed(SEED + epoch * world_size + rank)  # 7, 9: its own, also when resumed
        total = torch.zeros(1, device=device)
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(ddp(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)  # 6: adds up the losses of all processes
        if rank == 0:  # 6
            print(f"epoch {epoch}: loss {total.item() / len(loader) / world_size:.6f}", flush=True)  # 6
            save(epoch + 1, model, optimizer)  # 8: one process writes
    dist.barrier()  # 8: nobody leaves while rank 0 still writes
    dist.destroy_process_group()  # 1: the processes part


if __name__ == "__main__":
    main()
