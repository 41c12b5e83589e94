"""Train on several devices with DistributedDataParallel, one process per device: plain PyTorch, for your own project.

One process, to debug:   python train_ddp.py --data ../../mpdemo/data/digits.npz
One node, 2 processes:   torchrun --standalone --nproc-per-node=2 train_ddp.py --data ../../mpdemo/data/digits.npz
Two nodes, on each one:  as above, with --nnodes=2 --node-rank=0 (or 1) --master-addr=FIRST_NODE for --standalone
Slurm:                   sbatch train_ddp.sbatch
All print the same losses. The same command again goes on from its checkpoint. The checklist: nine_steps.md."""

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=64, help="of all processes together")
parser.add_argument("--checkpoint", default="train_ddp.pt")
args = parser.parse_args()
if "RANK" not in os.environ:  # no launcher: a world of one process
    os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
gpus = torch.cuda.device_count()  # 1 where Slurm shows each process its own GPU only: hence the remainder
device = f"cuda:{int(os.environ['LOCAL_RANK']) % gpus}" if gpus else "cpu"
if gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpus else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
assert args.batch_size % world == 0, f"--batch-size {args.batch_size} is not a multiple of {world} processes"
torch.manual_seed(0)  # every process splits the data in the same way
data, order = np.load(args.data), torch.randperm(1797)  # your data here: two data sets of (image, label)
images, labels = torch.from_numpy(data["images"])[order, None] / 16, torch.from_numpy(data["labels"])[order].long()
train = TensorDataset(images[:1536], labels[:1536])  # images: (1536, 1, 8, 8), 0 to 1
check = TensorDataset(images[1536:][rank::world], labels[1536:][rank::world])  # a sampler would repeat some images
sampler = DistributedSampler(train, drop_last=True)  # gives each process its own share of every batch
loader = DataLoader(train, args.batch_size // world, sampler=sampler, drop_last=True)
layers = nn.Conv2d(1, 32, 3), nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10)
model = DistributedDataParallel(nn.Sequential(*layers).to(device))  # your model here; starts from rank 0's weights
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
state = {"epoch": 0}
if os.path.exists(args.checkpoint):
    state = torch.load(args.checkpoint, map_location=device)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
for epoch in range(state["epoch"] + 1, args.epochs + 1):
    model.train()
    sampler.set_epoch(epoch)  # without it every epoch has the order of the first
    totals = torch.zeros(2, device=device)  # of this process: mean loss, right answers
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()  # DDP averages the gradients of all processes here
        optimizer.step()
        totals[0] += loss.detach() / len(loader) / world
    model.eval()  # batch norm and dropout behave otherwise in a validation
    with torch.no_grad():  # model.module: the processes need not have the same number of validation batches
        for x, y in DataLoader(check, args.batch_size):
            totals[1] += (model.module(x.to(device)).argmax(1) == y.to(device)).sum()
    dist.all_reduce(totals)  # the sum over all processes: the loss of the whole batches, the answers on all images
    if rank == 0:
        print(f"epoch {epoch} loss {totals[0]:.6f} correct {int(totals[1])} of {len(images) - 1536}", flush=True)
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, args.checkpoint + ".tmp")
        os.replace(args.checkpoint + ".tmp", args.checkpoint)  # a job that is killed leaves no half checkpoint
dist.barrier()  # all are here: without it PyTorch sometimes aborts on the next line
dist.destroy_process_group()
