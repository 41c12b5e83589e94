"""Train a model that is cut into stages, one process per stage: plain PyTorch, for your own project.

DATA is ../scripts/digits.npz. --cut 3: layers 0 to 2, and the rest. All print the same losses.
One process, to debug:   python train_pipeline.py --data DATA
One node, 2 processes:   torchrun --standalone --nproc-per-node=2 train_pipeline.py --data DATA --cut 3
Two nodes, on each one:  with --nnodes=2 --node-rank=0 (or 1) --master-addr=FIRST_NODE for --standalone
Slurm:                   in the last line of ../scripts/train.sbatch. Each resumes its checkpoints."""

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--cut", type=int, nargs="*", default=[], help="layers that begin a stage, from 0")
parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="1f1b")
parser.add_argument("--microbatches", type=int, default=4, help="of a batch, at least one per process")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--checkpoint", default="train_pipeline", help="begins the name of a stage's file")
args = parser.parse_args()
if "RANK" not in os.environ:  # no launcher: a world of one process
    os.environ |= dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
gpus = torch.cuda.device_count()  # 1 where Slurm shows each process its own: hence the %
device = torch.device(f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % gpus}" if gpus else "cpu")
if gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpus else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
is_first, is_last = rank == 0, rank == world - 1
assert len(args.cut) == world - 1, f"--cut {args.cut}: {world} processes need {world - 1} numbers"
assert args.microbatches >= world, f"--microbatches {args.microbatches} is less than one per process"
assert args.batch_size % args.microbatches == 0, f"--batch-size is no multiple of {args.microbatches}"

torch.manual_seed(0)  # every process makes the same split, weights and order of images
data, order = np.load(args.data), torch.randperm(1797)  # your data here: two sets of (image, label)
images = torch.from_numpy(data["images"])[order, None] / 16
labels = torch.from_numpy(data["labels"])[order].long()
train = TensorDataset(images[:1536], labels[:1536])  # images: (1536, 1, 8, 8), 0 to 1
check = TensorDataset(images[1536:], labels[1536:])
# No DistributedSampler: every process has the same batches. drop_last: a schedule has one batch size.
shuffle = torch.Generator()
loader = DataLoader(train, args.batch_size, shuffle=True, generator=shuffle, drop_last=True)
check_loader = DataLoader(check, args.batch_size, drop_last=True)
layers = nn.Sequential(  # your model here, a flat list; BatchNorm would see microbatches
    *(nn.Conv2d(1, 32, 3), nn.GroupNorm(4, 32), nn.ReLU()),
    *(nn.Conv2d(32, 32, 3), nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 10)),
)
bounds = [0, *args.cut, len(layers)]
model = layers[bounds[rank] : bounds[rank + 1]].to(device)  # this process's stage
stage = PipelineStage(model, rank, world, device)
Schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[args.schedule]
schedule = Schedule(stage, args.microbatches, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)  # of this stage
state, file = {"epoch": 0}, f"{args.checkpoint}-stage{rank}.pt"
if os.path.exists(file):
    state = torch.load(file, map_location=device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
epochs = [None] * world
dist.all_gather_object(epochs, state["epoch"])
assert len(set(epochs)) == 1, f"the stages' checkpoints are of different epochs, {epochs}: delete them"

for epoch in range(state["epoch"] + 1, args.epochs + 1):
    model.train()
    shuffle.manual_seed(epoch)  # each epoch has its own order, the same in every process
    totals = torch.zeros(2, device=device)  # mean loss, right answers: known to the last stage
    for x, y in loader:
        optimizer.zero_grad()
        losses = []  # of the microbatches
        inputs = (x.to(device),) if is_first else ()
        targets = {"target": y.to(device), "losses": losses} if is_last else {}
        schedule.step(*inputs, **targets)  # forward and backward of all microbatches
        optimizer.step()
        totals[0] += torch.stack(losses).mean().detach() / len(loader) if is_last else 0
    model.eval()  # dropout behaves otherwise in a validation
    for x, y in check_loader:
        inputs = (x.to(device),) if is_first else ()
        outputs = schedule.eval(*inputs, **({"target": y.to(device)} if is_last else {}))
        totals[1] += (outputs.argmax(1) == y.to(device)).sum() if is_last else 0
    if is_last:
        count = len(check_loader) * args.batch_size
        print(f"epoch {epoch} loss {totals[0]:.6f} correct {int(totals[1])} of {count}")
    state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), epoch=epoch)
    torch.save(state, file + ".tmp")
    dist.barrier()  # all stages are written, so that all get their names at nearly the same time
    os.replace(file + ".tmp", file)
dist.barrier()  # all are here: without it PyTorch sometimes aborts on the next line
dist.destroy_process_group()
