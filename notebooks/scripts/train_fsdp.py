"""Train a model that fits on no single device: FSDP2, one process per device, in plain PyTorch.

One machine:     torchrun --standalone --nproc-per-node=2 train_fsdp.py  (1 instead of 2 to debug)
Several nodes:   sbatch train.sbatch, with this file's name in it
The same command resumes, also with another number of processes, which reshards the checkpoint."""

import copy
import faulthandler
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, WORKERS = 5, 64, 0  # batch: of all processes together; workers: per process
ACCUMULATE = 1  # microbatches that a process computes before each update
BF16 = False  # compute in bfloat16; weights, gradients and optimizer state stay in float32
CHECKPOINT = Path(sys.argv[1] if sys.argv[1:] else "train_fsdp")  # a folder per epoch is named after it


def make_dataset():  # yours: the same in every process
    digits = np.load(Path(__file__).with_name("digits.npz"))
    images, labels = torch.tensor(digits["images"]) / 16, torch.tensor(digits["labels"]).long()
    return TensorDataset(images, labels)  # 1,797 images (8, 8), from 0 to 1: a sequence of 8 rows


class Net(nn.Module):
    """Yours: a model that consists mostly of blocks, like every transformer."""

    def __init__(self, width=64, blocks=4):
        super().__init__()
        self.inside, self.out = nn.Linear(8, width), nn.Linear(width, 10)
        layer = nn.TransformerEncoderLayer(width, 4, 128, 0.0, batch_first=True)
        self.blocks = nn.ModuleList(copy.deepcopy(layer) for _ in range(blocks))

    def forward(self, x):
        x = self.inside(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean(1)).float()


def make_model(device, rank):
    with torch.device("meta"):  # shapes only: no process has memory for the whole model
        model = Net()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if BF16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)  # whole only while it computes, one block after the other
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)  # memory for this rank's shards
    torch.manual_seed(0)
    first = Net() if rank == 0 else nn.Module()  # whole, on one CPU: load pretrained weights here
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, first.state_dict(), options=options)
    for name, buffer in model.named_buffers():  # RoPE's, with persistent=False, are in no state dict
        if rank == 0:
            buffer.copy_(first.get_buffer(name))
        dist.broadcast(buffer, 0)
    return model


def newest():
    """Return the newest complete checkpoint and the epochs it has seen."""
    complete = CHECKPOINT.parent.glob(f"{CHECKPOINT.name}-*/.metadata")  # which is written last
    epochs = max((int(file.parent.name.split("-")[-1]) for file in complete), default=0)
    return f"{CHECKPOINT}-{epochs}", epochs


def main():
    faulthandler.register(signal.SIGUSR2)  # kill -USR2 PID: the rank prints where it is
    cuda = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    rank, world = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world} on {device}\n", end="", flush=True)  # look here first in every log
    assert BATCH % (world * ACCUMULATE) == 0, f"cannot divide {BATCH} by {world} x {ACCUMULATE}"
    model = make_model(device, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # of the shards
    sampler = DistributedSampler(make_dataset(), drop_last=True)
    options = {"drop_last": True, "num_workers": WORKERS, "pin_memory": cuda}
    loader = DataLoader(sampler.dataset, BATCH // world // ACCUMULATE, sampler=sampler, **options)
    parts = len(loader) // ACCUMULATE * ACCUMULATE  # of whole batches
    folder, epochs = newest()
    if epochs:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=folder)  # each process reads what it needs
        loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **loaded)
    for epoch in range(epochs, EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        torch.manual_seed(epoch * world + rank)  # so that each rank has its own dropout
        total = torch.zeros((), device=device)
        for part, (images, labels) in zip(range(1, parts + 1), loader, strict=False):
            # Every backward pass reduce-scatters, so gradients stay sharded. To do it only in the last,
            # model.set_requires_gradient_sync(False) keeps them whole: 28 GB for a 7B model in fp32.
            outputs = model(images.to(device, non_blocking=True))
            loss = cross_entropy(outputs, labels.to(device, non_blocking=True)) / ACCUMULATE
            loss.backward()
            total += loss.detach()
            if part % ACCUMULATE == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm of the whole gradient
                optimizer.step()
                optimizer.zero_grad()
        dist.all_reduce(total)  # every rank makes this call; one prints
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total / world / parts * ACCUMULATE:.6f}", flush=True)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=f"{CHECKPOINT}-{epoch + 1}")
    dist.destroy_process_group()


if __name__ == "__main__":  # the loader's workers may import this file again
    main()
