"""Right answers that are written otherwise than the solutions, each of which the check must accept."""

from wrong_answers.ddp import RING

ECHO = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gres=gpu:2
#SBATCH --time=00:05:00
#SBATCH --output=work/slurm-%j.out
echo "starting..."
srun python -u -m mpdemo.labs.hello
"""
WITH_AN_ELLIPSIS = """
import torch

@torch.no_grad()
def replicate(model, *copies):
    for other in copies:
        for target, source in zip(other.state_dict().values(), model.state_dict().values()):
            target[...] = source
"""
BY_SEND_AND_RECV = """
import torch
import torch.distributed as dist

def report(loss, rank, world_size):
    total = torch.tensor(loss)
    if rank == 1:
        dist.send(total, 0)
        return None
    other = torch.empty(())
    dist.recv(other, 1)
    return ((total + other) / world_size).item()
"""
IMPORTED_SEND = """
import torch
from torch.distributed import recv, send
from torch.nn.functional import cross_entropy

def train_step(stage, images, labels, rank):
    if rank == 0:
        outputs, gradient = stage(images), torch.empty(8, 4)
        send(outputs.detach(), 1)
        recv(gradient, 1)
        outputs.backward(gradient)
        return None
    activations = torch.empty(8, 4)
    recv(activations, 0)
    loss = cross_entropy(stage(activations.requires_grad_()), labels)
    loss.backward()
    send(activations.grad, 0)
    return loss
"""
BY_BATCHES = (
    IMPORTED_SEND.replace("import recv, send", "import P2POp, batch_isend_irecv, irecv, isend")
    + """
def send(tensor, other):
    for work in batch_isend_irecv([P2POp(isend, tensor, other)]):
        work.wait()


def recv(tensor, other):
    for work in batch_isend_irecv([P2POp(irecv, tensor, other)]):
        work.wait()
"""
)
ATOMIC = """
from os import fdatasync, replace

import torch

def save(state, path):
    temporary = path.with_name("partial.pt")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        fdatasync(file)
    replace(temporary, path)
"""
IN_A_FOLDER = """
import os
import shutil
import tempfile

import torch

def save(state, path):
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        temporary = os.path.join(folder, "new")
        torch.save(state, temporary)
        number = os.open(temporary, os.O_RDONLY)
        os.fsync(number)
        os.close(number)
        shutil.move(temporary, path)
"""
LONG = """#!/bin/bash
#SBATCH -t 01:00:00 --ntasks-per-node=1
#SBATCH --requeue --signal=USR1@60 # a warning
#SBATCH --open-mode=append --output=work/slurm-%j.out

status=0
srun python -u -m mpdemo train --rung=single --model=transformer --batch-size=64 \\
  --steps=12 --log-every=1 --out=work/long --resume=auto || status=$?
if [ "$status" -eq 3 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
"""
MEET = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH -c 4 --time=00:05:00
#SBATCH --output=work/slurm-%j.out

ADDRESS
export MASTER_ADDR MASTER_PORT=29517
srun -c4 \\
  python -u -m mpdemo.labs.failures.meet  # not with localhost
"""
NODES = 'scontrol show hostnames "$SLURM_JOB_NODELIST"'
ADDRESSES = (
    f"MASTER_ADDR=$({NODES} | head -1)",
    f"MASTER_ADDR=$({NODES} | sed -n 1p)",
    f"MASTER_ADDR=`{NODES}`\nMASTER_ADDR=${{MASTER_ADDR%%$'\\n'*}}",
    f"mapfile -t nodes < <({NODES})\nMASTER_ADDR=${{nodes[0]}}",
    f"nodes=($({NODES}))\nMASTER_ADDR=${{nodes[0]}}",
    f"read -r MASTER_ADDR <<< $({NODES} | tr '\\n' ' ' | cut -d ' ' -f 1)",
    "MASTER_ADDR=$(hostname)",
)
EACH_TWICE_BUT_THE_LAST = """
from torch.utils.checkpoint import checkpoint_sequential

def forward(blocks, x):
    return checkpoint_sequential(blocks, len(blocks), x, use_reentrant=False)
"""
IMPORTED_BY_NAME = """
from torch.distributed import all_reduce, get_world_size

def DistributedOptimizer(optimizer, named_parameters):
    for _, parameter in named_parameters:
        parameter.register_post_accumulate_grad_hook(average)
    return optimizer

def average(parameter):
    all_reduce(parameter.grad)
    parameter.grad /= get_world_size()
"""
BY_KEYWORDS = """
import torch
from torch.distributed import all_gather_into_tensor, reduce_scatter_tensor

def all_reduce(tensor, world_size):
    part = torch.empty(len(tensor) // world_size)
    reduce_scatter_tensor(output=part, input=tensor)
    all_gather_into_tensor(output_tensor=tensor, input_tensor=part)
"""
OF_A_LIST = """
import torch
import torch.distributed as dist

def gradient(rows, images, targets, world_size):
    weight, own = torch.empty(len(rows) * world_size, rows.shape[1]), torch.empty_like(rows)
    dist.all_gather(list(weight.chunk(world_size)), rows)
    weight.requires_grad_()
    ((images @ weight.T - targets) ** 2).mean().backward()
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(own, weight.grad)
    return own / world_size
"""
TORCHRUN = """torchrun --standalone --nproc_per_node 4 -m mpdemo train --rung pipeline --model transformer \\
  --batch-size 64 --schedule 1f1b --microbatches 8 --cut block.1,block.3,block.5
"""
IN_ONE_BATCH = """
import torch
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

def shift(tensor, rank, world_size):
    received = torch.empty_like(tensor)
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    for work in batch_isend_irecv([P2POp(isend, tensor, after), P2POp(irecv, received, before)]):
        work.wait()
    return received

"""
IN_ONE_BATCH += RING[RING.index("def reduce_scatter") :]
DIST = "import torch\nimport torch.distributed as dist\n"
DECORATED = BY_KEYWORDS.replace("def all_reduce", "@torch.no_grad()\ndef all_reduce")


def cleared_at_the_end(model, optimizer, loss_fn, images, labels, parts):
    optimizer.zero_grad()
    for part, target in zip(images.chunk(parts), labels.chunk(parts), strict=True):
        (loss_fn(model(part), target) / parts).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def share_of_a_permutation(rank, world_size, epoch, images):
    import torch

    order = torch.randperm(images, generator=torch.Generator().manual_seed(epoch))
    return order[: images - images % world_size][rank::world_size]


def of_a_tensor(sizes):
    import torch

    sums = torch.tensor(sizes, dtype=torch.double).cumsum(0)
    return torch.maximum(sums, sums[-1] - sums)[:-1].argmin() + 1


RIGHT = {
    "00.10": [ECHO],
    "01.2": [cleared_at_the_end],
    "02.3": [WITH_AN_ELLIPSIS],
    "02.8": [3.3, 3.33],
    "03.3": [BY_SEND_AND_RECV],
    "03.4": [
        IN_ONE_BATCH,
        IN_ONE_BATCH.replace("P2POp(isend", "dist.P2POp(dist.isend").replace("import torch\n", DIST),
    ],
    "03.9": [share_of_a_permutation],
    "03.12": ["a, c, b, d", "A c b D", ["a", "c", "b", "d"]],
    "04.2": [of_a_tensor],
    "04.5": [IMPORTED_SEND, BY_BATCHES],
    "05.8": [TORCHRUN],
    "07.2": [BY_KEYWORDS, DECORATED],
    "07.3": [OF_A_LIST],
    "09.5": [ATOMIC, IN_A_FOLDER],
    "09.11": [LONG],
    "10.7": ["da", "A, d", ["a", "d"]],
    "10.9": [MEET.replace("ADDRESS", address, 1) for address in ADDRESSES],
    "11.4": [EACH_TWICE_BUT_THE_LAST],
    "11.7": [{"rung": "ddp", "processes": 8, "accumulate": 2}, {"rung": "ddp", "processes": 8, "micro_batch_size": 8}],
    "12.7": [IMPORTED_BY_NAME],
}
