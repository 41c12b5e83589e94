"""Right answers that are written otherwise than the solutions, each of which the check must accept."""

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


RIGHT = {
    "00.10": [ECHO],
    "01.2": [cleared_at_the_end],
    "02.3": [WITH_AN_ELLIPSIS],
    "02.8": [3.3, 3.33],
    "03.3": [BY_SEND_AND_RECV],
    "03.9": [share_of_a_permutation],
    "03.12": ["a, c, b, d", "A c b D", ["a", "c", "b", "d"]],
    "09.5": [ATOMIC, IN_A_FOLDER],
    "09.11": [LONG],
    "10.9": [MEET.replace("ADDRESS", address, 1) for address in ADDRESSES],
    "10.7": ["da", "A, d", ["a", "d"]],
}
