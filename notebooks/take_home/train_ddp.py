"""Train on several devices with DistributedDataParallel, one process per device: plain PyTorch.

One process, to debug:   python train_ddp.py --data DATA, which is ../scripts/digits.npz
One node, 2 processes:   torchrun --standalone --nproc-per-node=2 train_ddp.py --data DATA
Two nodes, on each one:  with --nnodes=2 --node-rank=0 (or 1) --master-addr=FIRST_NODE for --standalone
Slurm:                   ../scripts/train.sbatch. All print the same losses. Checklist: nine_steps.md"""

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
parser.add_argument("--checkpoint", default="train_ddp.pt", help="the same command goes on from it")
args = parser.parse_args()
if "RANK" not in os.environ:  # no launcher: a world of one process
    os.environ |= dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
gpus = torch.cuda.device_count()  # 1 where Slurm shows each process its own: hence the %
device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % gpus}" if gpus else "cpu"
if gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpus else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
assert args.batch_size % world == 0, f"--batch-size {args.batch_size} is no multiple of {world} ranks"
torch.manual_seed(rank)  # each process draws its own dropout; DDP copies rank 0's first weights to all
data, order = np.load(args.data), torch.randperm(1797, generator=torch.Generator().manual_seed(0))
images = torch.from_numpy(data["images"])[order, None] / 16  # your data here, the same in every process
labels = torch.from_numpy(data["labels"])[order].long()
train = TensorDataset(images[:1536], labels[:1536])  # images: (1536, 1, 8, 8), 0 to 1
check = TensorDataset(images[1536:][rank::world], labels[1536:][rank::world])  # no repeats
sampler = DistributedSampler(train, drop_last=True)  # each process has its share of a batch
loader = DataLoader(train, args.batch_size // world, sampler=sampler, drop_last=True)
layers = nn.Conv2d(1, 32, 3), nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10)
model = DistributedDataParallel(nn.Sequential(*layers).to(device))  # your model here
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
    with torch.no_grad():  # model.module: each process may have its own number of batches here
        for x, y in DataLoader(check, args.batch_size):
            totals[1] += (model.module(x.to(device)).argmax(1) == y.to(device)).sum()
    dist.all_reduce(totals)  # over all processes: the loss of whole batches, all right answers
    if rank == 0:
        print(f"epoch {epoch} loss {totals[0]:.6f} correct {totals[1]:.0f} of 261", flush=True)
        state = dict(model=model.module.state_dict(), optimizer=optimizer.state_dict(), epoch=epoch)
        torch.save(state, args.checkpoint + ".tmp")
        os.replace(args.checkpoint + ".tmp", args.checkpoint)  # never half a file
dist.barrier()  # all are here: without it PyTorch sometimes aborts on the next line
dist.destroy_process_group()
